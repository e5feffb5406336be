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

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
    early_buffers: set[int] = field(default_factory=set)
    """Modules, by id, whose buffers belong to the first stage; those of others to the last."""
    shared_buffers: set[tuple[int, str]] = field(default_factory=set)
    """Buffers, by module and name, that the end to which they do not belong reads."""


def look_at(model: nn.Module, trunk: str, x: Nest) -> Anatomy:
    """Runs the model once and refuses one whose blocks are no plain chain."""
    blocks = list(model.get_submodule(trunk).children())
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    outputs: list[Any] = []
    anatomy = Anatomy(trunk)
    hidden: list[Tensor] = []
    uses = _BufferUses(model, trunk)

    def before(_: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        calls.append((arguments, settings))
        if len(calls) > 1:
            return None
        uses.go_on("between")
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
        if len(outputs) == len(blocks):
            uses.go_on("behind")

    def seen(module: nn.Module, *_: Any) -> None:
        if not calls:
            anatomy.prefix_modules.add(id(module))

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    hooks += [module.register_forward_pre_hook(seen) for module in model.modules()]
    try:
        with torch.enable_grad(), _all_trainable(model), modes_kept(model):
            set_mode(model, training=True)
            with uses.watched():
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
    uses.divide(anatomy)
    return anatomy


class _BufferUses:
    """Which buffers outside the blocks are used and written before, between and behind them."""

    def __init__(self, model: nn.Module, trunk: str) -> None:
        self._model = model
        inside = set(model.get_submodule(trunk).modules())
        self._modules = {n: m for n, m in model.named_modules() if m not in inside and m._buffers}
        self._place = "before"
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
            if now is not before or not same_bits(copied, was):
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
                written = self._written.get((id(module), key), set())
                used = written | self._used.get((id(module), key), set()) - {"between"}
                if (written and len(used) > 1) or "between" in written:
                    self._refuse(f"buffer {name!r}", written, used)
                ends |= dict.fromkeys(written, name)
            if len(ends) > 1:
                names = " and ".join(map(repr, ends.values()))
                self._refuse(f"one of the buffers {names}", {"before"}, {"behind"})
            if "before" in ends:
                anatomy.early_buffers.add(id(module))
            elif "behind" in ends:
                anatomy.early_buffers.discard(id(module))
            other = "behind" if id(module) in anatomy.early_buffers else "before"
            anatomy.shared_buffers |= {
                (id(module), key)
                for key in module._buffers
                if other in self._used.get((id(module), key), ())
            }

    def _refuse(self, what: str, written: set[str], used: set[str]) -> None:
        raise ConfigurationError(
            f"{what} of this {type(self._model).__name__} is written"
            f" {' and '.join(sorted(written))} the blocks and used {' and '.join(sorted(used))}"
            " them: the ends are stages of their own, and what one writes the other does not see."
            " Give each end a module with its own buffers, or pass a list of modules, one per"
            " stage."
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
def random_weights(model: nn.Module) -> Iterator[None]:
    """Lends a model weights of which none is zero or like another, and puts its own back.

    What a model computes at its own may hide what it is: a head that begins at zero makes all that
    comes before look unused. Signs and sizes stay, so that what runs on its own weights runs on
    these; the generators of others are left alone.
    """
    # Kept on the host: the device may have no room for the weights twice.
    own = [
        (p.data, p.detach().to("cpu", copy=True))
        for p in model.parameters()
        if not is_lazy(p) and (p.is_floating_point() or p.is_complex())
    ]
    try:
        for number, (values, _) in enumerate(own):
            generator = torch.Generator(values.device).manual_seed(number)
            noise = torch.rand(values.shape, generator=generator, device=values.device) * 2 - 1
            inputs = values[0].numel() if values.dim() > 1 and len(values) else 1
            small = 0.2 * max(1, inputs) ** -0.5  # so that deep models do not overflow
            # Through .data: to graphs of the caller's this is no change.
            values.copy_(torch.where(values == 0, small * noise, values * (1 + noise / 2)))
        yield
    finally:
        for values, kept in own:
            values.copy_(kept)


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
    plain attribute: zeros that take no memory. So does a buffer, which becomes a copy: what runs
    here for nothing may write it. One that is read here and never written stays the model's.
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
        if (id(module) in self._anatomy.early_buffers) != self._first:
            frame._buffers = {}
            for key, buffer in module._buffers.items():
                shared = (id(module), key) in self._anatomy.shared_buffers
                frame.__dict__[key] = buffer if shared or buffer is None else buffer.clone()
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
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())
