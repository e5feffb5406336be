"""The user's model and its copies: the model of replica 0, and one for every other replica here.

A process trains some stages, and the user's model has the values of the others as they were when
somebody last gathered them. From the first step on nobody may read those: tensors of other stages
get a class of their own meanwhile, which raises. So every way to read them is met, of a part of the
model or of a single weight too, and the model itself stays as the user made it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

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

    def begin(self, cut: Cut, replicas: int, here: Collection[int]) -> None:
        """Makes the copies, and settles what is trained and what of it ``here``: which stages."""
        # Replica 0's is the user's own model.
        self.cuts = [cut, *(cut.copy() for _ in range(1, replicas))]
        own, *copies = self
        self._frozen = [(name, p) for name, p in own.named_parameters() if not p.requires_grad]
        for copy in copies:
            self._flags += _pair(own.modules(), copy.modules(), "training")
            self._flags += _pair(own.parameters(), copy.parameters(), "requires_grad")
        self._attributes = [Attributes([model]) for model in self]
        self._elsewhere = list(_trained_elsewhere(cut, here))
        for cut in self.cuts:
            cut.trust(self.lent)

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

    def load(self, state: dict[str, Any]) -> None:
        _check_state(state, self.cuts[0].model)
        with self.lent():
            for model in self:
                model.load_state_dict(state)
        self.show()

    # ---------------------------------------------------------------- what other processes train

    def hide(self) -> None:
        """From now on other processes change what this one does not see."""
        if not self._hidden:
            for tensor, _, hidden in self._elsewhere:
                tensor.__class__ = hidden
            self._hidden = True

    def show(self) -> None:
        """All is the newest here too, or nobody may look."""
        if self._hidden:
            for tensor, own, _ in self._elsewhere:
                tensor.__class__ = own
            self._hidden = False

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


def _check_state(state: dict[str, Any], model: nn.Module) -> None:
    """Refuses, before anything is changed, what ``load_state_dict`` would."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"{state!r} is no state: give what state_dict() returned.")
    own = model.state_dict(keep_vars=True)
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

    stage = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _leaves_values_alone(func, args):
            raise IncompleteModel(
                f"a weight or buffer was read that belongs to stage {cls.stage}, which another"
                " process trains: its values here are old. Call trainer.gather() in all processes;"
                " then the model is whole until the next step. trainer.state_dict() has all"
                " weights, too."
            )
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


def _trained_elsewhere(cut: Cut, here: Collection[int]) -> Iterator[tuple[Tensor, type, type]]:
    """Weights and buffers of other stages; what is frozen is the same everywhere."""
    modules = [m for stage in here for m in cut.modules[stage].modules()]
    # Stages may also have tensors of others as plain attributes, such as constants.
    own = {id(t) for module in modules for t in vars(module).values()}
    own |= {id(t) for k in here for m in [cut.modules[k]] for t in [*m.parameters(), *m.buffers()]}
    kinds: dict[tuple[int, type], type] = {}
    for stage, module in enumerate(cut.modules):
        weights = (p for p in module.parameters() if p.requires_grad)
        for tensor in chain(weights, module.buffers()):
            if id(tensor) in own:
                continue
            own.add(id(tensor))  # once is enough
            kind = type(tensor)
            if (stage, kind) not in kinds:
                kinds[stage, kind] = type(kind.__name__, (Elsewhere, kind), {"stage": stage})
            yield tensor, kind, kinds[stage, kind]
