"""What modules hold beside the values of their weights, and what of it a script has changed since.

A copy of a module, a trace, a recording and compiled code have this built in: numbers (a drop rate,
a temperature), modes, hooks, a ``forward`` replaced on the instance, modules and parameters
themselves. Also numbers in whatever else a module holds: lists, dicts, a configuration.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import is_, is_not
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import ConfigurationError

_NUMBERS = (int, float, complex)  # and so bool
_PLAIN = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device)
_OTHERS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType, Generator, Optimizer)
"""What has attributes that are not settings of a module that holds it."""
_LARGEST = 256
"""Entries of a list or dict that is looked into: a vocabulary is no setting."""
_DEEPEST = 3
_OF_STATE = {
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}
"""Attributes of every module that have no say in its forward."""
HOOKS = {
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
}
_OURS = ("offbeat.cutting", "offbeat.stages")
"""Where modules come from that stand around those of a script."""
GONE: Any = object()
"""What an attribute is changed to that is deleted."""


class Change(NamedTuple):
    holder: int
    """Number of what holds the attribute; the same in a copy of the modules."""
    module: nn.Module
    part: str
    """What of the module holds it: an attribute; nothing where it is the module itself."""
    path: str
    """Of the holder."""
    name: Any
    before: Any
    now: Any

    def __str__(self) -> str:
        if self.part in HOOKS:
            return f"a hook of {self.path.rpartition('.')[0] or 'the model'}"
        return ".".join(p for p in (*self.path.split("."), str(self.name)) if p and p[0] != "_")

    @property
    def is_plain(self) -> bool:
        return isinstance(self.now, _PLAIN)

    @property
    def is_number(self) -> bool:
        return isinstance(self.now, _NUMBERS) and not isinstance(self.now, bool)


@dataclass(frozen=True)
class _Holder:
    module: nn.Module
    part: str
    path: str
    values: Any
    """A dict or a list."""
    numbers: bool
    """Whether only numbers matter in it."""

    @property
    def view(self) -> Iterable[Any]:
        return self.values.values() if isinstance(self.values, dict) else self.values

    @property
    def items(self) -> dict[Any, Any]:
        return dict(self.values if isinstance(self.values, dict) else enumerate(self.values))


class Attributes:
    """Of modules and all they hold. What they themselves change while they run is no change."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._flat: list[Any] = []
        self._walk()

    def changes(self) -> list[Change]:
        """What a script has changed since :meth:`remember`."""
        return [] if self._is_same(self._now()) else list(self._differences())

    def remember(self) -> None:
        """From now on changes are those of what is now: the modules have run."""
        flat = self._now()
        if self._is_same(flat):
            return
        if len(flat) == len(self._flat) and not any(map(len, self._empty)):
            moved = [pair for pair in zip(flat, self._flat, strict=True) if is_not(*pair)]
            if all(isinstance(value, (*_PLAIN, Tensor)) for pair in moved for value in pair):
                self._flat = flat
                return
        self._walk()

    def set(self, change: Change) -> None:
        """Changes these modules likewise, of which the others are a copy."""
        values = self._holders[change.holder].values
        if change.now is GONE:
            del values[change.name]
        else:
            values[change.name] = change.now

    def put_back(self) -> None:
        """Undoes all changes of attributes."""
        for change in self.changes():
            self.set(change._replace(now=change.before))

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(self._views))

    def _is_same(self, flat: list[Any]) -> bool:
        # Identity, in one pass: it is asked in every step, and == would ask tensors.
        same = len(flat) == len(self._flat) and all(map(is_, flat, self._flat))
        return same and not any(map(len, self._empty))

    def _differences(self) -> Iterator[Change]:
        values = iter(self._flat)
        for number, (holder, names) in enumerate(zip(self._holders, self._names, strict=True)):
            before = dict(zip(names, islice(values, len(names)), strict=True))
            now = holder.items
            for name in {**before, **now}:
                one, other = before.get(name, GONE), now.get(name, GONE)
                seen = (
                    not holder.numbers or isinstance(one, _NUMBERS) or isinstance(other, _NUMBERS)
                )
                if seen and not _are_same(one, other):
                    yield Change(number, holder.module, holder.part, holder.path, name, one, other)

    def _walk(self) -> None:
        self._holders: list[_Holder] = []
        self._entered: set[int] = set()
        for root in self._modules:
            for path, module in root.named_modules():
                if not type(module).__module__.startswith(_OURS):
                    self._enter(_Holder(module, "", path, vars(module), numbers=False), 0)
        # Most hold nothing: hooks that nobody has put on.
        self._empty = [holder.values for holder in self._holders if not holder.values]
        self._views = [holder.view for holder in self._holders if holder.values]
        self._names = [list(holder.items) for holder in self._holders]
        self._flat = self._now()

    def _enter(self, holder: _Holder, depth: int) -> None:
        if id(holder.values) in self._entered or len(holder.values) > _LARGEST:
            return
        self._entered.add(id(holder.values))
        self._holders.append(holder)
        if depth == _DEEPEST:
            return
        for name, value in holder.items.items():
            part, path = holder.part or str(name), f"{holder.path}.{name}".lstrip(".")
            if name in _OF_STATE:
                continue
            inner = value if isinstance(value, (dict, list)) else _settings_of(value)
            if inner is not None:
                numbers = holder.numbers or inner is not value
                self._enter(_Holder(holder.module, part, path, inner, numbers), depth + 1)


def _settings_of(value: Any) -> dict[str, Any] | None:
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) and not isinstance(value, _OTHERS) else None


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):  # torch.export puts copies in the place of lists and dicts
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(one[n], other[n]) for n in one)
    return isinstance(one, _PLAIN) and one == other


def hook_of(modules: Iterable[nn.Module]) -> str | None:
    """The first hook on a module that may do what is no tensor's business.

    What runs without Python would leave that out. Not torch's own, and not those of transformers,
    which collect what the same forward returns.
    """
    for root in modules:
        for path, module in root.named_modules():
            for hook in chain.from_iterable(vars(module)[name].values() for name in sorted(HOOKS)):
                if not str(getattr(hook, "__module__", "") or type(hook).__module__).startswith(
                    ("torch.", "transformers.")
                ):
                    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)} on {path!r}"
    return None


def rebound(name: str, value: Any, module: nn.Module, copy: nn.Module) -> Any:
    """An attribute of a module as its copy has it: a method put on the instance is the copy's."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, copy)
    if name == "forward":
        raise ConfigurationError(
            f"the forward of a {type(module).__name__} was replaced on the instance, by a"
            f" {type(value).__name__} that would run the whole model in every stage. Replace it by"
            " types.MethodType(function, module) or in its class; mixed precision is"
            " Trainer(autocast=torch.bfloat16), with the model as it was before."
        )
    return value
