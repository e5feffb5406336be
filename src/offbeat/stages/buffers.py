"""Buffers that a forward pass writes: BatchNorm statistics and their like."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offbeat.stages.habits import Habits


class WrittenBuffers:
    """Undoes what a forward writes into buffers, so that only the recomputation counts.

    BatchNorm statistics must move once per batch. The first forward, and the first after modules
    went over to training or evaluation, shows which buffers are written at all; later ones save
    only those.
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
        places = self._habits.written
        if places is None:
            places = [(i, name) for i, m in enumerate(self._modules) for name in m._buffers]
        before = [(i, name, self._modules[i]._buffers[name]) for i, name in places]
        copies = [None if buffer is None else buffer.clone() for _, _, buffer in before]
        try:
            yield
        finally:
            written = []
            for (number, name, buffer), copy in zip(before, copies, strict=True):
                module = self._modules[number]
                # Values, not version counters: BatchNorm writes its statistics without counting.
                same = module._buffers[name] is buffer
                if (
                    self._habits.written is None
                    and same
                    and (buffer is None or copy is None or torch.equal(buffer, copy))
                ):
                    continue
                written.append((number, name))
                module._buffers[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.data.copy_(copy)
        if self._habits.written is None:
            self._habits.written = written
