"""Which end of a model with a list of blocks uses what: before the blocks, or from there on.

Two forwards in training, one behind the other, show it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import nest
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest
from offbeat.stages.trial import call, same_values


@dataclass
class Ends:
    """What belongs to which end: weights and modules by id, buffers by module and name."""

    path: str
    """Of the list of blocks."""
    early_weights: set[int] = field(default_factory=set)
    """What the blocks are called with depends on."""
    lent: set[tuple[int, str]] = field(default_factory=set)
    """Those of them, by module and name, whose values the last stage needs, too."""
    early_modules: set[int] = field(default_factory=set)
    """Those that have run to their end before the first block."""
    early_buffers: set[int] = field(default_factory=set)
    """Modules whose buffers belong to the first stage; those of others to the last.

    They are called before the first block, unless a module writes its buffers at the other end.
    """
    outputs: list[Nest] = field(default_factory=list)
    """What each block returns, empty tensors in the place of its own."""
    constants: set[tuple[int, str]] = field(default_factory=set)
    """Buffers that are used and that no end writes, so that both may have the model's."""


@contextmanager
def look_for_ends(model: nn.Module, path: str, x: Nest, found: list[Ends]) -> Iterator[None]:
    """Around a first forward of a model: runs it once more and finds what belongs to which end.

    What only the first forward writes, such as a cache of constants, any end may write.
    """
    buffers = _BufferWatch(model, path)
    watch = _Watch(model, path, buffers)
    yield
    with torch.no_grad():
        buffers.enter("before")
        with watch.attached(), buffers.attached(), watch.uses:
            watch.output = call(model, nest.replace(x, lambda t: t.clone()))
    watch.divide()
    buffers.divide(watch.ends)
    found.append(watch.ends)


class _Uses(TorchDispatchMode):
    """Which parameters are used, and which of them whatever is computed depends on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[int] = set()
        """By what ran while this was on."""
        self.on = True
        self._own: dict[int, set[int]] = {}
        """The parameters in a storage."""
        self._origins: dict[int, tuple[StorageWeakRef, set[int]]] = {}
        for parameter in parameters:
            self._add(parameter, {id(parameter)})
        self._own = {storage: ids.copy() for storage, (_, ids) in self._origins.items()}

    def _add(self, values: Nest, origins: set[int]) -> None:
        for storage in _storages_of(values):  # held weakly, so that no other gets its number
            self._origins.setdefault(storage.cdata, (storage, set()))[1].update(origins)

    def behind(self, values: Nest) -> set[int]:
        """The parameters that these values depend on, by id."""
        found = [self._origins.get(storage.cdata) for storage in _storages_of(values)]
        return {origin for entry in found if entry is not None for origin in entry[1]}

    def forget(self, values: Nest) -> None:
        """Takes values as given from here on."""
        for storage in _storages_of(values):
            self._origins.pop(storage.cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.on:
            for storage in _storages_of([args, kwargs]):
                self.used |= self._own.get(storage.cdata, set())
            self._add(result, self.behind([args, kwargs]))
        return result


def _storages_of(values: Nest) -> list[StorageWeakRef]:
    strided = [tensor for tensor in nest.tensors(values) if tensor.layout is torch.strided]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in strided]


class _Watch:
    """What one forward uses before the blocks and later, and what the blocks return."""

    def __init__(self, model: nn.Module, path: str, buffers: "_BufferWatch") -> None:
        self.uses = _Uses(model.parameters())
        self.output: Nest = None
        """Of the model."""
        self.ends = Ends(path)
        self._model, self._buffers = model, buffers
        self._blocks = list(model.get_submodule(path).children())
        self._begun = 0
        """How many times a block has been called."""
        self._called: set[int] = set()
        """Modules."""
        self._given: set[int] = set()
        """Parameters that what the blocks are called with depends on."""
        self._early: set[int] = set()
        """Parameters used before the last block has ended."""

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

    def _begin(self, _: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        if not self._begun:
            self._buffers.enter("between")
        self._begun += 1
        self._given |= self.uses.behind([arguments, settings])
        self.uses.forget([arguments, settings])
        self.uses.on = False  # what a block does is its own affair

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        self.uses.on = True
        self.ends.outputs.append(nest.replace(output, lambda _: torch.empty(0)))
        if len(self.ends.outputs) == len(self._blocks):
            self._buffers.enter("behind")
            self._early, self.uses.used = self.uses.used, set()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._called.add(id(module))
        if not self._begun:
            self.ends.early_buffers.add(id(module))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not self._begun:
            self.ends.early_modules.add(id(module))

    def divide(self) -> None:
        """Says which weights and modules are early, and what of that is used later, too.

        What this batch does not use lies before the blocks or behind them as it is registered.
        """
        if self._begun != len(self._blocks):
            raise ConfigurationError(
                f"the {len(self._blocks)} blocks of {self.ends.path} of this"
                f" {type(self._model).__name__} were called {self._begun} times in one forward:"
                " each must run once. Pass a list of modules, one per stage."
            )
        late = self.uses.used | self.uses.behind(self.output)
        early = self._given | (self._early - late)
        blocks = self._model.get_submodule(self.ends.path)
        for module in self._model.modules():
            if module is blocks:
                break
            early |= {id(p) for p in module.parameters(recurse=False) if id(p) not in late}
            if id(module) not in self._called and blocks not in module.modules():
                self.ends.early_modules.add(id(module))
                self.ends.early_buffers.add(id(module))
        self.ends.early_weights = early
        for parameter in (p for p in self._model.parameters() if id(p) in early & late):
            holders = [
                (id(module), key)
                for module in self._model.modules()
                for key, own in module.named_parameters(recurse=False, remove_duplicate=False)
                if own is parameter
            ]
            # A module that has run before the blocks needs it only if no other has it.
            apart = [place for place in holders if place[0] not in self.ends.early_modules]
            self.ends.lent.update(apart or holders)


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
            _assign_buffers(module, _Telltale(buffers, partial(self._use, module)))
        try:
            yield
            self.enter("")
        finally:
            for module, buffers in own.items():
                for key, buffer in _buffers_of(module).items():
                    buffers.setdefault(key, buffer)  # registered by this very forward
                _assign_buffers(module, buffers)

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
                if not ever and (id(module), key) in self._uses:
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


def _assign_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    module._buffers = buffers


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
