"""Which end of a model with a list of blocks uses what: before the blocks, or from there on.

One forward in training shows it. A model whose blocks do not hand each other a hidden state, and
nothing else, is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest
from offbeat.stages.trial import call, same_values, switch_mode


@dataclass
class Ends:
    """What belongs to which end: weights and modules by id, buffers by module and name."""

    path: str
    """Of the list of blocks."""
    early_weights: set[int] = field(default_factory=set)
    """What the hidden state at the first block depends on."""
    late_weights: set[int] = field(default_factory=set)
    """What is used from the first block on, of all that is known to be; some is early, too."""
    early_modules: set[int] = field(default_factory=set)
    """Those that have run to their end before the first block."""
    early_buffers: set[int] = field(default_factory=set)
    """Modules whose buffers belong to the first stage; those of others to the last.

    They are called before the first block, unless a module writes its buffers at the other end.
    """
    constants: set[tuple[int, str]] = field(default_factory=set)
    """Buffers that no end writes, so that both may have the model's."""


def find_ends(model: nn.Module, path: str, x: Nest) -> Ends:
    """Runs a model once and says what belongs to which end."""
    buffers = _BufferWatch(model, path)
    with torch.no_grad(), switch_mode(model, training=True):
        call(model, x)  # what only a first forward writes, a cache of constants, any end may write
    buffers.enter("before")
    watch = _Watch(model, path, buffers)
    with torch.enable_grad(), _train_all(model), switch_mode(model, training=True):
        with watch.attached(), buffers.attached():
            output = call(model, x)
        watch.ends.early_weights = _weights_behind(watch.hidden, list(model.parameters()))
        watch.note_late_weights(output)
    watch.check_chain()
    buffers.divide(watch.ends)
    return watch.ends


def hidden_of(output: Any) -> Any:
    """The hidden state in what a block returns."""
    return output[0] if isinstance(output, tuple) else output


def _weights_behind(hidden: Tensor | None, parameters: Sequence[nn.Parameter]) -> set[int]:
    """The parameters, by id, that the hidden state at the first block depends on."""
    if hidden is None or not hidden.requires_grad:
        return set()
    try:
        gradients = torch.autograd.grad(hidden.sum(), parameters, allow_unused=True)
    except RuntimeError as error:  # reentrant checkpoints
        raise ConfigurationError(
            "what runs before the blocks cannot be asked which weights it uses"
            f" ({str(error).partition('.')[0]}). Leave checkpointing to the blocks, or pass a list"
            " of modules, one per stage."
        ) from error
    return {id(p) for p, g in zip(parameters, gradients, strict=True) if g is not None}


@contextmanager
def _train_all(model: nn.Module) -> Iterator[None]:
    """Lets frozen parameters have gradients, too."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Watch:
    """What one forward calls before the blocks and later, and how it calls the blocks."""

    def __init__(self, model: nn.Module, path: str, buffers: "_BufferWatch") -> None:
        self.hidden: Tensor | None = None
        """What the first block is called with."""
        self._model, self._buffers = model, buffers
        self._blocks = list(model.get_submodule(path).children())
        self.ends = Ends(path)
        self._late_modules: set[int] = set()
        """Called once the first block has been."""
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: list[Any] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        modules = list(self._model.modules())
        hooks = [b.register_forward_pre_hook(self._begin, with_kwargs=True) for b in self._blocks]
        hooks += [block.register_forward_hook(self._end) for block in self._blocks]
        hooks += [module.register_forward_pre_hook(self._enter) for module in modules]
        hooks += [module.register_forward_hook(self._leave) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        self._calls.append((arguments, settings))
        if len(self._calls) > 1:
            return None
        self._buffers.enter("between")
        state = arguments[0] if arguments else None
        if not isinstance(state, Tensor) or not (state.is_floating_point() or state.is_complex()):
            raise ConfigurationError(
                f"the blocks of {self.ends.path} are not called with a floating-point tensor"
                " first, so the hidden state is not known. Pass a list of modules, one per stage."
            )
        self.hidden = state
        # From here on only the suffix can reach a parameter through the hidden state.
        # A copy, and no leaf: a block may begin by writing in place.
        return (state.detach().requires_grad_().clone(), *arguments[1:]), settings

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        self._outputs.append(output)
        if len(self._outputs) == len(self._blocks):
            self._buffers.enter("behind")

    def _enter(self, module: nn.Module, *_: Any) -> None:
        (self._late_modules if self._calls else self.ends.early_buffers).add(id(module))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not self._calls:
            self.ends.early_modules.add(id(module))

    def note_late_weights(self, output: Nest) -> None:
        """Those of modules that were called late, and those that the output depends on."""
        late = (m for m in self._model.modules() if id(m) in self._late_modules)
        weights = {id(p) for module in late for p in module.parameters(recurse=False)}
        floating = [t.sum().float() for t in nest.tensors(output) if t.is_floating_point()]
        with suppress(ConfigurationError):  # blocks may have checkpoints
            total = torch.stack(floating).sum() if floating else None
            weights |= _weights_behind(total, list(self._model.parameters()))
        self.ends.late_weights = weights

    def check_chain(self) -> None:
        """Refuses blocks that do not take what the one before returned, and else the same."""
        name = f"{self.ends.path} of this {type(self._model).__name__}"
        advice = "Pass a list of modules, one per stage."
        if len(self._calls) != len(self._blocks):
            raise ConfigurationError(
                f"the {len(self._blocks)} blocks of {name} were called {len(self._calls)} times in"
                f" one forward: each must run once. {advice}"
            )
        (_, *rest), settings = self._calls[0]
        for number, ((hidden, *others), named) in enumerate(self._calls[1:], 1):
            if hidden is not hidden_of(self._outputs[number - 1]):
                raise ConfigurationError(
                    f"block {number} of {name} is not called with what block {number - 1} returned:"
                    f" something happens in between. {advice}"
                )
            if not _same(others, rest) or not _same(named, settings):
                raise ConfigurationError(
                    f"block {number} of {name} is called with other arguments than block 0: only"
                    f" the hidden state may differ. {advice}"
                )


def _same(one: Nest, other: Nest) -> bool:
    """Whether two nests are alike in their tensors and in everything else."""
    rest, others = (nest.replace(part, lambda _: ...) for part in (one, other))
    return same_values(one, other) and bool(rest == others)


class _BufferWatch:
    """Which buffers outside the blocks are used and written before, between and behind them."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self._model = model
        inside = set(model.get_submodule(path).modules())
        self._modules = {
            n: m for n, m in model.named_modules() if m not in inside and _buffers_of(m)
        }
        self._part = "first"
        self._uses: dict[tuple[int, str], set[str]] = {}
        self._writes: dict[tuple[int, str], set[str]] = {}
        self._last = self._values()

    def _values(self) -> dict[tuple[int, str], tuple[Tensor | None, Tensor | None]]:
        return {
            (id(module), key): (buffer, None if buffer is None else buffer.detach().clone())
            for module in self._modules.values()
            for key, buffer in _buffers_of(module).items()
        }

    def enter(self, part: str) -> None:
        """Notes what the last part of the forward has written; the next one begins."""
        values = self._values()
        for at, (now, copy) in values.items():
            before, was = self._last.get(at, (None, None))
            if now is not before or not same_values(copy, was):
                self._writes.setdefault(at, set()).add(self._part)
        self._part, self._last = part, values

    @contextmanager
    def attached(self) -> Iterator[None]:
        own = {module: _buffers_of(module) for module in self._modules.values()}
        for module, buffers in own.items():
            module._buffers = _Telltale(buffers, partial(self._use, module))
        try:
            yield
            self.enter("")
        finally:
            for module, buffers in own.items():
                for key, buffer in _buffers_of(module).items():
                    buffers.setdefault(key, buffer)  # registered by this very forward
                module._buffers = buffers

    def _use(self, module: nn.Module, key: str) -> None:
        self._uses.setdefault((id(module), key), set()).add(self._part)

    def divide(self, ends: Ends) -> None:
        """Says which end gets which buffers, and refuses one that both would need."""
        for path, module in self._modules.items():
            written: dict[str, str] = {}  # by which end, and what
            for key in _buffers_of(module):
                name = f"{path}.{key}".lstrip(".")
                ever = self._writes.get((id(module), key), set())
                writers = ever - {"first"}
                self._refuse_use(name, writers, self._uses.get((id(module), key), set()))
                written |= dict.fromkeys(writers, name)
                if not ever:
                    ends.constants.add((id(module), key))
            if len(written) > 1:
                raise ConfigurationError(
                    f"buffer {written['before']!r} is written before the blocks and"
                    f" {written['behind']!r} behind them, and both are buffers of one module"
                    f" ({type(module).__name__}), which can belong to one end only. Move one of"
                    " them into a module of its own."
                )
            if "before" in written:
                ends.early_buffers.add(id(module))
            elif "behind" in written:
                ends.early_buffers.discard(id(module))

    def _refuse_use(self, name: str, writers: set[str], users: set[str]) -> None:
        what = f"buffer {name!r} of this {type(self._model).__name__} is written"
        if "between" in writers:
            raise ConfigurationError(
                f"{what} between its blocks, and blocks may lie in different stages: write it"
                " before or behind them, or pass a list of modules, one per stage."
            )
        users = writers | users - {"between"}
        if writers and len(users) > 1:
            raise ConfigurationError(
                f"{what} {' and '.join(sorted(writers))} the blocks and used"
                f" {' and '.join(sorted(users))} them: the ends are stages of their own, and what"
                " one writes the other does not see. Give each end a module with its own buffers,"
                " or pass a list of modules, one per stage."
            )


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers  # torch has no public name for the dict that a forward assigns to


class _Telltale(dict[str, Tensor | None]):
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
