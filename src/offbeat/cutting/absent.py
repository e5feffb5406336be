"""Weights that are not here: of a model built on ``torch.device("meta")``, or of other processes.

Such a tensor keeps its shape, type, device and identity, and takes no memory: on the CPU its place
is one that nobody has touched, elsewhere it is a zero, spread out. Nobody may read it;
:mod:`offbeat.engines.models` sees to that.
"""

import mmap
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn

from offbeat.errors import ConfigurationError
from offbeat.rng import seeded

_PRIVATE = {"flags": mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE} if sys.platform != "win32" else {}
_FILL = "_init_weights"
"""What a model of transformers calls its way to compute what a module begins with."""
_STEPS = (7, 1, 3, 2, 5)
"""How far apart neighbours along each dimension lie in the few numbers of a light weight."""


class Absent:
    """The tensors of a process that have no values there, and how they would lie in memory."""

    def __init__(self) -> None:
        self._layouts: dict[int, tuple[Tensor, torch.Size, tuple[int, ...]]] = {}
        self.tied: set[int] = set()
        """Those that several modules have, by id."""
        self.unread: dict[int, Tensor] = {}
        """Buffers that have some values to run with, and not yet their own."""

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._layouts

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for tensor, _, _ in list(self._layouts.values()))

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # tensors of copies are taken by themselves

    def hold(self, tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> None:
        """Counts it among these, as it is."""
        self._layouts[id(tensor)] = tensor, shape, stride

    def take(self, tensor: Tensor) -> None:
        """Lets go of its memory."""
        if tensor not in self and tensor.layout is torch.strided and tensor.numel() > 1:
            layout = self._layouts[id(tensor)] = tensor, tensor.shape, tensor.stride()
            tensor.data = _nothing(tensor, *layout[1:])

    def give(self, tensor: Tensor, value: Tensor, *, keep: bool = False) -> None:
        """Gives it memory with these values; ``keep``: their own, which nobody else has."""
        room = self.room(tensor)
        same = room.dtype == value.dtype and room.device == value.device
        if keep and same and room.stride() == value.stride():
            room = value
        else:
            room.copy_(value)
        self._layouts.pop(id(tensor), None)
        self.unread.pop(id(tensor), None)
        tensor.data = room

    def make(self, tensor: Tensor) -> None:
        """Gives it memory, with any values."""
        if tensor in self:
            room = self.room(tensor)
            del self._layouts[id(tensor)]
            tensor.data = room

    def room(self, tensor: Tensor) -> Tensor:
        """Memory as it would have, or has; with any values."""
        if tensor not in self:
            return tensor.detach()
        _, shape, stride = self._layouts[id(tensor)]
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)

    @contextmanager
    def lent(self, *, light: bool) -> Iterator[None]:
        """Lends random values to all that is absent.

        ``light``: values that take next to no memory, since neighbours share them, like no other
        weight's. Else, and where a weight is used in two places, as they would lie in memory: a
        stage that is given a copy of one would else compute with another layout, in other bits.
        """
        try:
            for number, tensor in enumerate(self):
                dense = not light or id(tensor) in self.tied
                tensor.data = _random_like(tensor, number, self.room(tensor) if dense else None)
            yield
        finally:
            for tensor, shape, stride in list(self._layouts.values()):
                tensor.data = _nothing(tensor, shape, stride)


def _nothing(tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Of the tensor's type and device; as it would lie in memory, where that costs none."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if tensor.device.type != "cpu" or not min(shape, default=1):
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(shape)
    if size * tensor.itemsize < mmap.PAGESIZE:
        return torch.zeros(size, dtype=tensor.dtype).as_strided(shape, stride)
    # The system gives pages to who writes them.
    untouched = torch.frombuffer(
        mmap.mmap(-1, size * tensor.itemsize, **_PRIVATE), dtype=tensor.dtype
    )
    return untouched.as_strided(shape, stride)


def _random_like(tensor: Tensor, number: int, room: Tensor | None) -> Tensor:
    shape = tensor.shape
    if room is None:
        steps = [_STEPS[place % len(_STEPS)] for place in range(len(shape))]
        size = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        room = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    else:
        steps = list(room.stride())
    flat = room.as_strided((room.untyped_storage().nbytes() // room.itemsize,), (1,))
    if tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator(tensor.device).manual_seed(number)
        noise = torch.empty(len(flat), device=tensor.device).uniform_(-1, 1, generator=generator)
        if len(shape) > 1:  # so that deep models neither overflow nor vanish
            noise *= (3 / max(1, prod(shape[1:]))) ** 0.5
        else:  # a scale, or what is added
            noise = 1 + noise / 2
        flat.copy_(noise)
    else:
        flat.zero_()
    return room.as_strided(shape, steps)


# ------------------------------------------------------------------ built on meta


def take_from_meta(model: nn.Module) -> Absent | None:
    """Puts what was built on meta on the device it will train on, without values; None if nothing.

    Buffers that no file has get their values as transformers computes them.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return None
    real = {tensor.device for tensor in tensors if not tensor.is_meta}
    device = real.pop() if len(real) == 1 else torch.get_default_device()
    if device.type == "meta":
        raise ConfigurationError(
            "the trainer is built under torch.device('meta'), so nothing says where to train: let"
            " that block end before Trainer(...)."
        )
    absent = Absent()
    _derive_buffers(model, device)
    for buffer in {id(b): b for b in model.buffers() if b.is_meta}.values():
        fill = 1 if buffer.is_floating_point() else 0
        _swap(buffer, torch.full(buffer.shape, fill, dtype=buffer.dtype, device=device))
        absent.unread[id(buffer)] = buffer
    for parameter in [p for p in model.parameters() if p.is_meta]:
        empty = torch.zeros((), dtype=parameter.dtype, device=device)
        nothing = _nothing(empty, shape := parameter.shape, stride := parameter.stride())
        _swap(parameter, nn.Parameter(nothing, requires_grad=parameter.requires_grad))
        absent.hold(parameter, shape, stride)
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    absent.tied = {place for place, count in holders.items() if count > 1}
    return absent


def _swap(tensor: Tensor, other: Tensor) -> None:
    """In place, so that whoever holds the tensor, under whichever name, holds it still."""
    other.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, other)


def _derive_buffers(model: nn.Module, device: torch.device) -> None:
    """Computes the buffers that no file has, or refuses."""
    for path, module in model.named_modules():
        kept = module.state_dict(keep_vars=True)
        keys = [
            key
            for key, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and key not in kept
        ]
        if not keys:
            continue
        found = [_derived(model, module, keys, device, fill) for fill in (0, 1)]
        for key, one, other in zip(keys, *found, strict=True):
            # What is written to is the same, whatever was there before.
            if one is None or other is None or not torch.equal(one, other):
                name = f"{path}.{key}".lstrip(".")
                raise ConfigurationError(
                    f"buffer {name!r} of this {type(model).__name__} was built on meta, and files"
                    " of weights do not have it (persistent=False), so its values are lost. Assign"
                    f" it before Trainer(...): model.{name} = ..., computed on a real device."
                )
            _swap(getattr(module, key), one)


def _derived(
    model: Any, module: nn.Module, keys: Iterable[str], device: torch.device, fill: int
) -> list[Tensor | None]:
    """By the model's own ``_init_weights``, as transformers does for models that it loads."""
    own = {key: getattr(module, key) for key in keys}
    made: list[Tensor | None] = []
    try:
        for key, buffer in own.items():
            setattr(module, key, torch.full_like(buffer, fill, device=device))
        with torch.no_grad(), seeded(0, device):
            getattr(model, _FILL)(module)
        made = [getattr(module, key) for key in own]
    except Exception:  # there is none, or it knows nothing of this module
        made = [None for _ in own]
    finally:
        for key, buffer in own.items():
            setattr(module, key, buffer)
    return made
