"""Buffers that a forward pass writes: BatchNorm statistics and their like."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from offbeat.errors import StageError
from offbeat.stages.habits import Habits

_SMALL = 2**16
"""Bytes of a buffer that is saved whether or not it is known to be written."""


class WrittenBuffers:
    """Undoes what a forward writes into buffers, so that only the recomputation counts.

    BatchNorm statistics must move once per batch. The first forward, and the first after modules
    went over to training or evaluation, shows which buffers are written at all. Later ones save
    those and all small ones; a large one that begins to change is refused.
    """

    def __init__(self, modules: Iterable[nn.Module], habits: Habits | None = None) -> None:
        self._modules = [sub for module in modules for sub in module.modules()]
        self._habits = habits or Habits()
        self._modes: list[bool] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        modes = [module.training for module in self._modules]
        if modes != self._modes:
            self._habits.written, self._modes = None, modes
        known = self._habits.written
        before: list[tuple[int, str, Tensor | None, int, Tensor | None]] = []
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                version, copy = 0, None
                if buffer is not None:
                    version = buffer._version
                    if known is None or _is_small(buffer) or (number, name) in known:
                        copy = buffer.clone()
                before.append((number, name, buffer, version, copy))
        begun: list[str] = []
        try:
            yield
        finally:
            written = []
            for number, name, buffer, version, copy in before:
                module = self._modules[number]
                changed = buffer is not None and buffer._version != version
                if not changed and module._buffers[name] is buffer:
                    # Values, too: BatchNorm writes its statistics without counting.
                    if buffer is None or copy is None:
                        continue
                    if (known is None or buffer.is_cpu) and torch.equal(buffer, copy):
                        continue
                written.append((number, name))
                module._buffers[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.data.copy_(copy)
                elif changed:
                    begun.append(name)
        if begun:
            raise StageError(
                f"buffer {begun[0]!r} of {_SMALL // 1024} KiB or more began to change after its"
                " first batch. Rule 'recompute' runs a forward twice and puts buffers back in"
                " between: small ones, and those that a first forward writes. Write it from the"
                f" first forward on, if only by {begun[0]}.add_(0), or use backward='current' or"
                " backward='stash'."
            )
        if known is None:
            self._habits.written = written


def _is_small(buffer: Tensor) -> bool:
    if buffer.layout is not torch.strided or not buffer.is_contiguous():
        return False  # what shares memory with itself cannot be written back
    return buffer.numel() * buffer.element_size() < _SMALL
