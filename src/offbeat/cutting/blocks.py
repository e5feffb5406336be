"""Any model with a trunk: a list of blocks that hand a hidden state to each other.

Most large models are a prefix (embeddings), a ``ModuleList`` of like blocks, and a suffix (norm,
head), written as one ``forward``. It is cut between blocks without touching that code:

- the first stage runs the model's own ``forward`` and leaves it where the next stage's first block
  would be called; what that block would be called with is the message;
- a stage in the middle calls its blocks one after the other;
- the last stage calls its blocks, then runs the model's ``forward`` with weightless stand-ins
  before the trunk and the finished hidden state in its place, so that the suffix sees the real one.

This is right only for models in which blocks hand each other nothing but the hidden state, and in
which the suffix uses nothing of the prefix. Both ways are run on the first batch, also on random
weights, behind which nothing can hide, and a model that is not like that is refused.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest


def is_block(model: nn.Module, path: str | None) -> bool:
    """Whether ``path`` points into a list of blocks; without one, whether there is any list."""
    lists = _lists(model)
    return bool(lists) if path is None else path.rpartition(".")[0] in lists


def find_trunk(model: nn.Module, path: str | None = None) -> str:
    """The name of the list of blocks: the one ``path`` points into, or the longest."""
    lists = _lists(model)
    if path is not None:
        owner, _, number = path.rpartition(".")
        if owner in lists and number.isdigit() and int(number) < len(lists[owner]):
            return owner
        raise ConfigurationError(
            f"cuts: {path!r} is not a block of this {type(model).__name__}. A stage begins at a"
            f" block of a ModuleList: {_example(lists)}."
        )
    return max(lists, key=lambda name: len(lists[name]))


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1}


def _example(lists: dict[str, nn.ModuleList]) -> str:
    name = max(lists, key=lambda name: len(lists[name]))
    return f"here {name}.1 to {name}.{len(lists[name]) - 1}"


def call(model: nn.Module, x: Nest) -> Nest:
    """Calls a model with a batch; a dict of its arguments' names is spread over them."""
    names = inspect.signature(model.forward).parameters
    settings = {"use_cache": False} if "use_cache" in names else {}  # nothing is generated here
    if isinstance(x, dict) and all(name in names for name in x):
        return model(**{**settings, **x})
    return model(x, **settings)


class Whole(nn.Module):
    """A model in one stage, called as it would be in several."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Nest) -> Nest:
        return call(self.model, x)


# ------------------------------------------------------------------------- looking


@dataclass
class Anatomy:
    """What belongs to which end of a model, seen on one batch."""

    trunk: str
    prefix: set[int] = field(default_factory=set)
    """Parameters, by id, that the hidden state at the first block depends on."""
    prefix_modules: set[int] = field(default_factory=set)
    """Modules, by id, called before the first block."""
    late_modules: set[int] = field(default_factory=set)
    """Modules, by id, called once the first block has been."""
    done_early: set[int] = field(default_factory=set)
    """Modules, by id, that have run to their end before the first block."""
    early_buffers: set[int] = field(default_factory=set)
    """Modules, by id, whose buffers belong to the first stage; those of others to the last."""
    shared_buffers: set[tuple[int, str]] = field(default_factory=set)
    """Buffers, by module and name, that no end writes, so that both may have the model's."""


def look_at(model: nn.Module, trunk: str, x: Nest) -> Anatomy:
    """Runs the model once and refuses one whose blocks are no plain chain."""
    blocks = list(model.get_submodule(trunk).children())
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    outputs: list[Any] = []
    anatomy = Anatomy(trunk)
    hidden: list[Tensor] = []
    uses = _BufferUses(model, trunk)
    with torch.no_grad(), modes_kept(model):
        set_mode(model, training=True)
        call(model, x)  # what only a first forward writes, a cache of constants, any end may write
    uses.go_on("before")

    def before(_: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        calls.append((arguments, settings))
        if len(calls) > 1:
            return None
        uses.go_on("between")
        state = arguments[0] if arguments else None
        if not isinstance(state, Tensor) or not (state.is_floating_point() or state.is_complex()):
            raise ConfigurationError(
                f"the blocks of {trunk} are not called with a floating-point tensor first, so the"
                " hidden state is not known. Pass a list of modules, one per stage."
            )
        hidden.append(arguments[0])
        # From here on only the suffix can reach a parameter through the hidden state.
        # A copy, and no leaf: a block may begin by writing in place.
        return (arguments[0].detach().requires_grad_().clone(), *arguments[1:]), settings

    def after(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(output)
        if len(outputs) == len(blocks):
            uses.go_on("behind")

    def seen(module: nn.Module, *_: Any) -> None:
        (anatomy.late_modules if calls else anatomy.prefix_modules).add(id(module))

    def done(module: nn.Module, *_: Any) -> None:
        if not calls:
            anatomy.done_early.add(id(module))

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    hooks += [module.register_forward_pre_hook(seen) for module in model.modules()]
    hooks += [module.register_forward_hook(done) for module in model.modules()]
    try:
        with torch.enable_grad(), _all_trainable(model), modes_kept(model):
            set_mode(model, training=True)
            with uses.watched():
                call(model, x)
            anatomy.prefix = _needed_for(hidden, list(model.parameters()))
    finally:
        for hook in hooks:
            hook.remove()
    _refuse_ties(model, anatomy)
    _check_chain(model, trunk, len(blocks), calls, outputs)
    uses.divide(anatomy)
    return anatomy


def _needed_for(hidden: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> set[int]:
    """The parameters, by id, that the hidden state at the first block depends on."""
    if not hidden or not hidden[0].requires_grad:
        return set()
    try:
        found = torch.autograd.grad(hidden[0].sum(), parameters, allow_unused=True)
    except RuntimeError as error:  # reentrant checkpoints
        raise ConfigurationError(
            "what runs before the blocks cannot be asked which weights it uses"
            f" ({str(error).partition('.')[0]}). Leave checkpointing to the blocks, or pass a list"
            " of modules, one per stage."
        ) from error
    return {id(p) for p, gradient in zip(parameters, found, strict=True) if gradient is not None}


class _BufferUses:
    """Which buffers outside the blocks are used and written before, between and behind them."""

    def __init__(self, model: nn.Module, trunk: str) -> None:
        self._model = model
        inside = set(model.get_submodule(trunk).modules())
        self._modules = {n: m for n, m in model.named_modules() if m not in inside and m._buffers}
        self._place = "first"
        self._used: dict[tuple[int, str], set[str]] = {}
        self._written: dict[tuple[int, str], set[str]] = {}
        self._last = self._values()

    def _values(self) -> dict[tuple[int, str], tuple[Tensor | None, Tensor | None]]:
        return {
            (id(module), key): (buffer, None if buffer is None else buffer.detach().clone())
            for module in self._modules.values()
            for key, buffer in module._buffers.items()
        }

    def go_on(self, place: str) -> None:
        """Notes what was written since the last place, and goes on to the next."""
        values = self._values()
        for at, (now, copied) in values.items():
            before, was = self._last.get(at, (None, None))
            if now is not before or not same_values(copied, was):
                self._written.setdefault(at, set()).add(self._place)
        self._place, self._last = place, values

    @contextmanager
    def watched(self) -> Iterator[None]:
        kept = {module: module._buffers for module in self._modules.values()}
        for module, buffers in kept.items():
            module._buffers = _Watched(buffers, partial(self._use, module))
        try:
            yield
            self.go_on("")
        finally:
            for module, buffers in kept.items():
                for key, buffer in module._buffers.items():
                    buffers.setdefault(key, buffer)  # registered by this very forward
                module._buffers = buffers

    def _use(self, module: nn.Module, key: str) -> None:
        self._used.setdefault((id(module), key), set()).add(self._place)

    def divide(self, anatomy: Anatomy) -> None:
        """Says which end gets which buffers, and refuses one that both would need."""
        anatomy.early_buffers = set(anatomy.prefix_modules)
        for path, module in self._modules.items():
            ends: dict[str, str] = {}  # an end that writes, and what
            for key in module._buffers:
                name = f"{path}.{key}".lstrip(".")
                ever = self._written.get((id(module), key), set())
                written = ever - {"first"}
                self._refuse_use(name, written, self._used.get((id(module), key), set()))
                ends |= dict.fromkeys(written, name)
                if not ever:
                    anatomy.shared_buffers.add((id(module), key))
            if len(ends) > 1:
                raise ConfigurationError(
                    f"buffer {ends['before']!r} is written before the blocks and"
                    f" {ends['behind']!r} behind them, and both are buffers of one module"
                    f" ({type(module).__name__}), which can belong to one end only. Move one of"
                    " them into a module of its own."
                )
            if "before" in ends:
                anatomy.early_buffers.add(id(module))
            elif "behind" in ends:
                anatomy.early_buffers.discard(id(module))

    def _refuse_use(self, name: str, written: set[str], used: set[str]) -> None:
        what = f"buffer {name!r} of this {type(self._model).__name__} is written"
        if "between" in written:
            raise ConfigurationError(
                f"{what} between its blocks, and blocks may lie in different stages: write it"
                " before or behind them, or pass a list of modules, one per stage."
            )
        used = written | used - {"between"}
        if written and len(used) > 1:
            raise ConfigurationError(
                f"{what} {' and '.join(sorted(written))} the blocks and used"
                f" {' and '.join(sorted(used))} them: the ends are stages of their own, and what"
                " one writes the other does not see. Give each end a module with its own buffers,"
                " or pass a list of modules, one per stage."
            )


class _Watched(dict[str, Tensor | None]):
    """The buffers of a module, which tell when one is asked for or assigned."""

    def __init__(self, buffers: dict[str, Tensor | None], tell: Callable[[str], None]) -> None:
        super().__init__(buffers)
        self._tell = tell

    def __getitem__(self, key: str) -> Tensor | None:
        self._tell(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Tensor | None) -> None:
        self._tell(key)
        super().__setitem__(key, value)


def _check_chain(
    model: nn.Module,
    trunk: str,
    blocks: int,
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    outputs: Sequence[Any],
) -> None:
    name = f"{trunk} of this {type(model).__name__}"
    advice = "Pass a list of modules, one per stage."
    if len(calls) != blocks:
        raise ConfigurationError(
            f"the {blocks} blocks of {name} were called {len(calls)} times in one forward: each"
            f" must run once. {advice}"
        )
    (_, *rest), settings = calls[0][0], calls[0][1]
    for number in range(1, blocks):
        (given, *others), named = calls[number]
        if given is not _hidden_of(outputs[number - 1]):
            raise ConfigurationError(
                f"block {number} of {name} is not called with what block {number - 1} returned:"
                f" something happens in between. {advice}"
            )
        same = len(others) == len(rest) and all(map(_same, others, rest))
        if (
            not same
            or named.keys() != settings.keys()
            or not all(_same(named[key], settings[key]) for key in named)
        ):
            raise ConfigurationError(
                f"block {number} of {name} is called with other arguments than block 0: only the"
                f" hidden state may differ. {advice}"
            )


def _refuse_ties(model: nn.Module, anatomy: Anatomy) -> None:
    """One parameter at both ends would be trained by two stages."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        late = id(module) in anatomy.late_modules
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in anatomy.prefix:
                continue
            name = f"{path}.{key}".lstrip(".")
            other = names.setdefault(id(parameter), name)
            if late:
                again = "is used before the blocks and once they have begun"
                if other != name:
                    again = f"is also {name!r}, which is used once the blocks have begun"
                raise ConfigurationError(
                    f"parameter {other!r} {again}: stages update their own weights, so one"
                    " parameter cannot belong to two. Untie it (Hugging Face:"
                    " config.tie_word_embeddings = False)."
                )


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Puts every module back into training or evaluation, as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def set_mode(model: nn.Module, *, training: bool) -> None:
    """Puts a model into training, each module in the mode that it has there, or evaluation."""
    # train() recurses: in a model that is in training already it would wake frozen BatchNorms.
    if not (training and model.training):
        model.train(training)


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


# ------------------------------------------------------------------------- cutting


def stages_of(model: nn.Module, anatomy: Anatomy, places: Sequence[int]) -> list[nn.Module]:
    """The stages of a model whose trunk is cut at these blocks."""
    blocks = list(model.get_submodule(anatomy.trunk).children())
    stages: list[nn.Module] = [_First(model, anatomy, blocks[: places[0]])]
    for begin, end in pairwise(places):
        stages.append(_Middle(blocks[begin:end]))
    return [*stages, _Last(model, anatomy, blocks[places[-1] :])]


def parts_of(model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """The smallest pieces, to be weighed: a block each, with the prefix or the suffix at an end."""
    blocks = len(list(model.get_submodule(anatomy.trunk).children()))
    return stages_of(model, anatomy, range(1, blocks))


class _Reached(Exception):
    """Leaves a forward where the next stage begins, with what its block would be called with."""

    def __init__(self, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.settings = arguments, settings


class _Border(nn.Module):
    """Stands where the next stage's first block was."""

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        raise _Reached(arguments, settings)


class _Door(nn.Module):
    """Stands for the whole trunk and hands out what its last block has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.body: _Body | None = None
        self.output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self.body is not None
        self.body.wake()
        output, self.output = self.output, None
        return output


class _Body:
    """A copy of a model's frame around its own submodules, with another trunk and fewer weights.

    Modules are copied without their tensors. A parameter that belongs to another stage becomes a
    plain attribute: zeros that take no memory. So does a buffer, which becomes a copy: what runs
    here for nothing may write it. One that is never written stays the model's.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, trunk: nn.Module, *, first: bool
    ) -> None:
        self._frames: list[tuple[nn.Module, nn.Module, bool]] = []
        """Of each module, and whether it has run to its end before the blocks."""
        self._anatomy, self._first = anatomy, first
        # By id, so that what has two names stays one.
        made = {id(model.get_submodule(anatomy.trunk)): trunk}
        self.module = self._copy(model, made)

    def _copy(self, module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        # As copy.copy(), which parametrized modules refuse; without what model.compile() has made.
        frame = object.__new__(type(module))
        frame.__dict__.update(nn.Module.__getstate__(module))
        frame._parameters = dict(module._parameters)
        for key, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in self._anatomy.prefix) != self._first:
                del frame._parameters[key]
                stand_in = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                frame.__dict__[key] = stand_in.expand(parameter.shape)
        # The very dict: a forward that assigns a buffer anew assigns the model's.
        frame._buffers = module._buffers
        if (id(module) in self._anatomy.early_buffers) != self._first:
            frame._buffers = {}
            for key, buffer in module._buffers.items():
                shared = (id(module), key) in self._anatomy.shared_buffers
                frame.__dict__[key] = buffer if shared or buffer is None else buffer.clone()
        frame._modules = {
            key: None if child is None else self._copy(child, made)
            for key, child in module._modules.items()
        }
        made[id(module)] = frame
        self._frames.append((module, frame, id(module) in self._anatomy.done_early))
        return frame

    def __call__(self, x: Nest) -> Nest:
        # In the last stage the prefix runs for nothing, and must draw no random numbers.
        self._follow_modes(asleep=not self._first)
        return call(self.module, x)

    def wake(self) -> None:
        """The prefix is over: what ran in it may run again."""
        self._follow_modes(asleep=False)

    def _follow_modes(self, *, asleep: bool) -> None:
        for module, frame, early in self._frames:  # train() and eval() are called on the original
            frame.training = module.training and not (asleep and early)


class _First(nn.Module):
    """Everything up to the first cut, by the model's own forward."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        trunk = nn.ModuleList([*blocks, _Border()])
        self._body = _Body(model, anatomy, trunk, first=True)
        self.frame = self._body.module

    def forward(self, x: Nest) -> Nest:
        try:
            self._body(x)
        except _Reached as reached:
            hidden, *rest = reached.arguments
            return {"x": x, "hidden": hidden, "rest": rest, "settings": reached.settings}
        raise ConfigurationError("the model's forward did not come to its trunk in this batch.")


class _Middle(nn.Module):
    """Some blocks, one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, given: Nest) -> Nest:
        return {**given, "hidden": _hidden_of(self._run(given))}

    def _run(self, given: Nest) -> Any:
        """What the last of the blocks returns."""
        output = given["hidden"]
        for block in self.blocks:
            output = block(_hidden_of(output), *given["rest"], **given["settings"])
        return output


class _Last(_Middle):
    """The last blocks, and the rest of the model's forward."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self._door = _Door()
        self._body = _Body(model, anatomy, nn.ModuleList([self._door]), first=False)
        self._door.body = self._body
        self.frame = self._body.module

    def forward(self, given: Nest) -> Nest:
        self._door.output = self._run(given)
        return self._body(given["x"])


def _hidden_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def same_values(one: Nest, other: Nest) -> bool:
    """Whether two nests hold the same values, in tensors of the same shapes and dtypes.

    NaN is the same as NaN, and 0 as -0.
    """
    ours, theirs = nest.tensors(one), nest.tensors(other)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())
