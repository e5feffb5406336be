"""The user's model and its copies: the model of replica 0, and one for every other replica here.

A process keeps the values of the stages that it trains. From the first step on it lets go of those
of others, until somebody gathers them, and nobody may read them: their tensors get a class of their
own meanwhile, which raises. So every way to read them is met, of a part of the model or of a single
weight too, and the model itself stays as the user made it.

Of a model that was built on meta nobody ever has all values: each process reads those of its own
stages from files, once it is known which these are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from offbeat.cutting.absent import Absent
from offbeat.cutting.cut import Cut
from offbeat.errors import ConfigurationError, IncompleteModel
from offbeat.stages.attributes import Attributes, Change


class Models:
    """The models that the replicas of this process train; copies follow the flags of the user's."""

    def __init__(self, cut: Cut) -> None:
        self.cuts = [cut]
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._flags: list[tuple[Any, Any, str]] = []
        """Parts of the user's model, their copies, and the flag that copies follow."""
        self._attributes: list[Attributes] = []
        """Of every model."""
        self._elsewhere: list[tuple[Tensor, type, type]] = []
        """Tensors that other processes train, their class, and the one they have while hidden."""
        self._hidden = False
        self._absent = cut.absent or Absent()
        self.is_spread = cut.absent is not None
        """Whether the model was built on meta."""
        self._others: list[tuple[Tensor, type, type]] = []
        """What other processes hold."""
        self._source: Mapping[str, Any] | None = None
        """Where values are read from once it is known which."""
        self._begun = False
        self.unread = self.is_spread
        """Whether nobody has said yet where values come from."""
        self._elsewhere = [*_out_of_reach(self._absent, _UNREAD)]
        if self.is_spread:
            self.hide()

    def begin(self, cut: Cut, replicas: int, here: Collection[int]) -> None:
        """Makes the copies, and settles what is trained and what of it ``here``: which stages."""
        # Replica 0's is the user's own model.
        self.cuts = [cut, *(cut.copy() for _ in range(1, replicas))]
        own, *copies = self
        self._take_copies(own, copies)
        self._frozen = [(name, p) for name, p in own.named_parameters() if not p.requires_grad]
        for copy in copies:
            self._flags += _pair(own.modules(), copy.modules(), "training")
            self._flags += _pair(own.parameters(), copy.parameters(), "requires_grad")
        self._attributes = [Attributes([model]) for model in self]
        self._others = list(_held_elsewhere(cut, here, _SPREAD if self.is_spread else _GATHER))
        others = {id(tensor) for tensor, _, _ in self._others}
        unread = (tensor for tensor in self._absent if id(tensor) not in others)
        self._elsewhere = [*self._others, *_out_of_reach(unread, _UNREAD)]
        self._begun = True
        for cut in self.cuts:
            cut.trust(self.on_trial)

    def _take_copies(self, own: nn.Module, copies: Sequence[nn.Module]) -> None:
        """A copy of what is absent is absent, too."""
        for copy in copies:
            for one, other in zip(_tensors_of(own), _tensors_of(copy), strict=True):
                if one in self._absent:
                    self._absent.take(other)
                if id(one) in self._absent.unread:
                    self._absent.unread[id(other)] = other

    def __iter__(self) -> Iterator[nn.Module]:
        return (cut.model for cut in self.cuts)

    def follow(self) -> list[Change]:
        """Lets stages and copies follow what the user has changed of the model since the last run.

        What they cannot follow is refused. It looks at the whole model, so that all processes
        refuse alike.
        """
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ConfigurationError(
                f"{thawed[0]} was frozen when this trainer began and has requires_grad now: what is"
                " trained is settled then. Keep the weights with state_dict(), and build a new"
                " Trainer with the model as it is to be trained. The batch was not started."
            )
        for own, copy, name in self._flags:
            setattr(copy, name, getattr(own, name))
        if not self._attributes:
            return []
        changes = self._attributes[0].changes()
        for change in changes:
            _refuse_other_parts(change, alone=len(self.cuts) == 1)
        if changes:
            self.cuts[0].follow(changes)
        for cut, attributes in zip(self.cuts[1:], self._attributes[1:], strict=True):
            for change in changes:
                if change.name != "training":
                    attributes.set(change)
            cut.follow(attributes.changes())
        return changes

    def remember(self) -> None:
        """What the models have changed of themselves by running is not the user's doing."""
        for attributes in self._attributes:
            attributes.remember()

    def load(self, state: Mapping[str, Any]) -> None:
        with self.lent():
            _check_state(state, self.cuts[0].model)
        if self.is_spread:
            self._source, self.unread = state, False
            self.read()
            return
        with self.made_whole():
            for tensor in self._absent:
                self._absent.make(tensor)
            for model in self:
                model.load_state_dict(dict(state))

    # ---------------------------------------------------------------- what is read from files

    def read(self) -> None:
        """Gives the stages here their values, if it is known which they are and where those lie."""
        if self._source is None or not self._begun:
            return
        with self._becoming_known() as others, torch.no_grad():
            for model in self:
                names = _names_of(model)
                for tensor in (t for t in _tensors_of(model) if id(t) not in others):
                    if found := [
                        name for name in names.get(id(tensor), ()) if name in self._source
                    ]:
                        value = self._source[found[0]]
                        self._absent.give(tensor, value, keep=isinstance(self._source, Shapes))
        self._source = None

    def make_room(self) -> None:
        """For the stages here, whose values will come from a checkpoint."""
        if self.is_spread:
            with self._becoming_known() as others:
                for tensor in self._absent:
                    if id(tensor) not in others:
                        self._absent.make(tensor)
                self._absent.unread.clear()
            self.unread, self._source = False, None

    @contextmanager
    def _becoming_known(self) -> Iterator[set[int]]:
        self.show()
        yield {id(tensor) for tensor, _, _ in self._others}
        self._elsewhere = self._others
        self.hide()

    def refuse_unread(self) -> None:
        if self.unread:
            kind = type(self.cuts[0].model).__name__
            raise ConfigurationError(
                f"this {kind} was built on meta, and nothing says what its weights are: call"
                " trainer.load_state_dict(folder) with its safetensors, or trainer.resume(folder),"
                " before the first step. To begin with fresh weights, build it once on a machine"
                " that has the memory and save them there."
            )

    def refuse_all_at_once(self, what: str, *, alone: bool) -> None:
        """``alone``: this process has all stages."""
        if self.is_spread and not alone:
            raise ConfigurationError(
                f"{what} would hold all weights in every process, and this"
                f" {type(self.cuts[0].model).__name__} was built on meta because none has the"
                " memory. trainer.save_pretrained(folder) writes a file per stage and an index,"
                " which from_pretrained and load_state_dict read; trainer.save(folder) writes"
                " exact checkpoints."
            )

    # ---------------------------------------------------------------- what other processes train

    def hide(self) -> None:
        """From now on other processes change what this one does not see."""
        if not self._hidden:
            for tensor, _, hidden in self._elsewhere:
                if not self.cuts[0].needs_values:
                    self._absent.take(tensor)
                tensor.__class__ = hidden
            self._hidden = True

    def show(self) -> None:
        """All is the newest here too, or nobody may look."""
        if self._hidden:
            for tensor, own, _ in self._elsewhere:
                tensor.__class__ = own
            self._hidden = False

    @contextmanager
    def made_whole(self) -> Iterator[None]:
        """Lets everybody read all of it afterwards."""
        hidden = self._hidden
        self.show()
        try:
            yield
        except BaseException:
            if hidden:
                self.hide()
            raise

    @contextmanager
    def lent(self) -> Iterator[None]:
        """For ourselves, who know what is old."""
        hidden = self._hidden
        self.show()
        try:
            yield
        finally:
            if hidden:
                self.hide()

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """For runs of which only the likeness counts: what is absent has random values."""
        with self.lent(), self._absent.lent(light=self.is_spread):
            yield

    def room_for(self, tensor: Tensor) -> Tensor:
        """Itself, or memory for what another process will send of it."""
        return self._absent.room(tensor)

    def give(self, tensor: Tensor, value: Tensor) -> None:
        """What another process has sent, of another size perhaps."""
        if tensor.shape != value.shape:
            self._absent.make(tensor)
            tensor.data = torch.empty_like(value)
        self._absent.give(tensor, value)


@runtime_checkable
class Shapes(Protocol):
    """Weights in files, of which the shapes are known before they are read."""

    def shapes(self) -> dict[str, Any]:
        """Tensors on meta, by name."""


def _refuse_other_parts(change: Change, *, alone: bool) -> None:
    if change.part in ("_parameters", "_modules"):
        raise ConfigurationError(
            f"{change} was replaced after this trainer began: what is trained is settled then."
            " Write new values into the old parameters, or keep the weights with state_dict() and"
            " build a new Trainer. The batch was not started."
        )
    if not alone and not change.is_plain:
        raise ConfigurationError(
            f"{change} was changed to a {type(change.now).__name__} after this trainer began, and"
            " the replicas of this process are copies that follow numbers and words only. Change"
            " it before the first step, or start a process per replica. The batch was not started."
        )


def _check_state(state: Mapping[str, Any], model: nn.Module) -> None:
    """Refuses, before anything is changed, what ``load_state_dict`` would."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"{state!r} is no state: give what state_dict() returned.")
    own = model.state_dict(keep_vars=True)
    if isinstance(state, Shapes):  # files have a tensor with two names once
        state = state.shapes()
        for names in _names_of(model).values():
            found = next((state[name] for name in names if name in state), None)
            state |= dict.fromkeys(names, found) if found is not None else {}
    for name in [*own, *state]:
        ours, theirs = own.get(name), state.get(name)
        if not isinstance(ours, Tensor) and name in own and name in state:
            continue  # what a module keeps besides tensors
        if not isinstance(theirs, Tensor) or ours is None or ours.shape != theirs.shape:
            here, there = _describe(own, name), _describe(state, name)
            raise ConfigurationError(
                f"load_state_dict: {name!r} is {there} in the state and {here} in this model. Give"
                " a state of the same model; nothing was loaded."
            )


def _describe(state: Mapping[str, Any], name: str) -> str:
    value = state.get(name)
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    return f"a {type(value).__name__}" if name in state else "missing"


def _pair(own: Iterable[Any], copies: Iterable[Any], flag: str) -> Iterator[tuple[Any, Any, str]]:
    return ((one, other, flag) for one, other in zip(own, copies, strict=True))


class Elsewhere:
    """Mixed into the class of a tensor that another process trains: reading its values raises."""

    why = ""
    """What to say."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _leaves_values_alone(func, args):
            raise IncompleteModel(cls.why)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_FACTS = {
    *("numel", "nelement", "size", "stride", "dim", "ndimension", "element_size", "__len__"),
    *("storage_offset", "get_device", "is_contiguous", "is_floating_point", "is_complex"),
    *("register_hook", "register_post_accumulate_grad_hook", "__set__", "__delete__"),
}
"""Methods that show no value; ``__set__`` is that of attributes."""
_VIEWS = ("data", "T", "H", "mT", "mH", "real", "imag")
"""Attributes that do."""


def _leaves_values_alone(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function of torch asks only what a tensor is, or writes to one of ours."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VIEWS
    in_place = name.endswith("_") and not name.endswith("__")
    return name in _FACTS or (in_place and isinstance(args[0], Elsewhere))


_GATHER = (
    "a weight or buffer was read that belongs to stage {stage}, which another process trains: it"
    " has no values here. Call trainer.gather() in all processes; then the model is whole until the"
    " next step. trainer.state_dict() has all weights, too."
)
_SPREAD = (
    "a weight or buffer was read that belongs to stage {stage}, which another process trains, and"
    " no process has all of a model that was built on meta. trainer.save_pretrained(folder) writes"
    " it."
)
_UNREAD = (
    "a weight or buffer was read of a model that was built on meta and has no values yet: each"
    " process reads those of its own stages. Call trainer.load_state_dict(folder); stages that the"
    " first batch decides are read in the first step."
)


def _out_of_reach(
    tensors: Iterable[Tensor], why: str, stage: int = 0
) -> Iterator[tuple[Tensor, type, type]]:
    kinds: dict[type, type] = {}
    for tensor in tensors:
        kind = type(tensor)
        if kind not in kinds:
            words = {"why": why.format(stage=stage)}
            kinds[kind] = type(kind.__name__, (Elsewhere, kind), words)
        yield tensor, kind, kinds[kind]


def _held_elsewhere(
    cut: Cut, here: Collection[int], why: str
) -> Iterator[tuple[Tensor, type, type]]:
    """Weights and buffers of other stages, trained or frozen."""
    modules = [m for stage in here for m in cut.modules[stage].modules()]
    # Stages may also have tensors of others as plain attributes, such as constants.
    own = {id(t) for module in modules for t in vars(module).values()}
    own |= {id(t) for k in here for t in _tensors_of(cut.modules[k])}
    for stage, module in enumerate(cut.modules):
        theirs = {id(t): t for t in _tensors_of(module) if id(t) not in own}
        own |= theirs.keys()  # once is enough
        yield from _out_of_reach(theirs.values(), why, stage)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _names_of(model: nn.Module) -> dict[int, list[str]]:
    """Of each tensor of a model's state all names."""
    names: dict[int, list[str]] = {}
    for name, entry in model.state_dict(keep_vars=True).items():
        names.setdefault(id(entry), []).append(name)
    return names
