"""Any model with a trunk: a list of blocks that hand a hidden state to each other.

Most large models are a prefix (embeddings), a ``ModuleList`` of like blocks, and a suffix (norm,
head), written as one ``forward``. It is cut between blocks without touching that code:

- the first stage runs the model's own ``forward`` and leaves it where the next stage's first block
  would be called; what that block would be called with is the message;
- a stage in the middle calls its blocks one after the other;
- the last stage calls its blocks, then runs the model's ``forward`` with weightless stand-ins
  before the trunk and the finished hidden state in its place, so that the suffix sees the real one.

This is right only for models in which blocks hand each other nothing but the hidden state, and in
which the suffix uses nothing of the prefix. Both ways are run on the first batch, and a model that
is not like that is refused.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    returns_tuple: bool = False
    """Whether blocks return the hidden state in a tuple."""


def look_at(model: nn.Module, trunk: str, x: Nest) -> Anatomy:
    """Runs the model once and refuses one whose blocks are no plain chain."""
    blocks = list(model.get_submodule(trunk).children())
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    outputs: list[Any] = []
    anatomy = Anatomy(trunk)
    hidden: list[Tensor] = []

    def before(_: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        calls.append((arguments, settings))
        if len(calls) > 1:
            return None
        if not arguments or not isinstance(arguments[0], Tensor):
            raise ConfigurationError(
                f"the blocks of {trunk} are not called with a tensor first, so the hidden state is"
                " not known. Pass a list of modules, one per stage."
            )
        hidden.append(arguments[0])
        # From here on only the suffix can reach a parameter through the hidden state.
        return (arguments[0].detach().requires_grad_(), *arguments[1:]), settings

    def after(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(output)

    def seen(module: nn.Module, *_: Any) -> None:
        if not calls:
            anatomy.prefix_modules.add(id(module))

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    hooks += [module.register_forward_pre_hook(seen) for module in model.modules()]
    try:
        with torch.enable_grad(), _all_trainable(model):
            call(model, x)
            parameters = list(model.parameters())
            found = (
                torch.autograd.grad(hidden[0].sum(), parameters, allow_unused=True)
                if hidden and hidden[0].requires_grad
                else [None] * len(parameters)
            )
    finally:
        for hook in hooks:
            hook.remove()
    anatomy.prefix = {
        id(p) for p, gradient in zip(parameters, found, strict=True) if gradient is not None
    }
    anatomy.returns_tuple = isinstance(outputs[0], tuple) if outputs else False
    _refuse_ties(model, anatomy)
    _check_chain(model, trunk, len(blocks), calls, outputs)
    return anatomy


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
        early = id(module) in anatomy.prefix_modules
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in anatomy.prefix:
                continue
            name = f"{path}.{key}".lstrip(".")
            if not early or id(parameter) in names:
                raise ConfigurationError(
                    f"parameter {names.get(id(parameter), 'of the first stage')!r} is also"
                    f" {name!r}: stages update their own weights, so one parameter cannot belong to"
                    " two. Untie it (Hugging Face: config.tie_word_embeddings = False)."
                )
            names[id(parameter)] = name


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
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
    """Stands for the whole trunk and hands out its finished hidden state."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        return (hidden,) if self._returns_tuple else hidden


class _Body:
    """A copy of a model's frame around its own submodules, with another trunk and fewer weights.

    Modules are copied without their tensors. A parameter that belongs to another stage becomes a
    plain attribute: zeros that take no memory. So does a buffer, which becomes a copy.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, trunk: nn.Module, *, first: bool
    ) -> None:
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._anatomy, self._first = anatomy, first
        self.module = self._copy(model, "", trunk)

    def _copy(self, module: nn.Module, name: str, trunk: nn.Module) -> nn.Module:
        if name == self._anatomy.trunk:
            return trunk
        frame = copy.copy(module)
        frame._parameters = dict(module._parameters)
        for key, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) in self._anatomy.prefix) != self._first:
                del frame._parameters[key]
                stand_in = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                frame.__dict__[key] = stand_in.expand(parameter.shape)
        # The very dict: a forward that assigns a buffer anew assigns the model's.
        frame._buffers = module._buffers
        if (id(module) in self._anatomy.prefix_modules) != self._first:
            frame._buffers = {}
            for key, buffer in module._buffers.items():
                frame.__dict__[key] = None if buffer is None else buffer.clone()
        frame._modules = {
            key: None if child is None else self._copy(child, f"{name}.{key}".lstrip("."), trunk)
            for key, child in module._modules.items()
        }
        self._pairs.append((module, frame))
        return frame

    def __call__(self, x: Nest) -> Nest:
        for module, frame in self._pairs:  # train() and eval() are called on the original
            frame.training = module.training
        return call(self.module, x)


class _First(nn.Module):
    """Everything up to the first cut, by the model's own forward."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        trunk = nn.ModuleList([*blocks, _Border()])
        self._body: Callable[[Nest], Nest] = _Body(model, anatomy, trunk, first=True)
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
        return {**given, "hidden": self._run(given)}

    def _run(self, given: Nest) -> Tensor:
        hidden: Tensor = given["hidden"]
        for block in self.blocks:
            hidden = _hidden_of(block(hidden, *given["rest"], **given["settings"]))
        return hidden


class _Last(_Middle):
    """The last blocks, and the rest of the model's forward."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self._door = _Door(anatomy.returns_tuple)
        self._body: Callable[[Nest], Nest] = _Body(
            model, anatomy, nn.ModuleList([self._door]), first=False
        )
        self.frame = self._body.module

    def forward(self, given: Nest) -> Nest:
        self._door.hidden = self._run(given)
        return self._body(given["x"])


def _hidden_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def same_bits(one: Nest, other: Nest) -> bool:
    """Whether two outputs hold the same tensors, to the bit."""
    ours, theirs = nest.tensors(one), nest.tensors(other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
