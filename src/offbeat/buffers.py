"""Buffers that a forward pass writes: BatchNorm statistics and their like."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


class WrittenBuffers:
    """Undoes what a forward writes into buffers, so that only the recomputation counts.

    BatchNorm statistics must move once per batch. The first forward shows which buffers are written
    at all; later ones save only those.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [sub for module in modules for sub in module.modules()]
        self._written: list[tuple[nn.Module, str]] | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        places = self._written
        if places is None:
            places = [(module, name) for module in self._modules for name in module._buffers]
        before = [(module, name, module._buffers[name]) for module, name in places]
        copies = [None if buffer is None else buffer.clone() for _, _, buffer in before]
        versions = [None if buffer is None else buffer._version for _, _, buffer in before]
        try:
            yield
        finally:
            written = []
            for (module, name, buffer), copy, version in zip(before, copies, versions, strict=True):
                now = module._buffers[name]
                if now is buffer and (now is None or now._version == version):
                    continue
                written.append((module, name))
                module._buffers[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.data.copy_(copy)
        if self._written is None:
            self._written = written
