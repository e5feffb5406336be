"""Fewer bytes on the wire: a row of numbers as bf16, or as int8 with one scale per tensor.

What rounding leaves out is remembered and added to the next message (error feedback), so that small
changes are late instead of lost.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    def encode(self, row: Tensor) -> list[Tensor]:
        """What goes on the wire for a row of numbers."""

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """The row as every replica reads it."""


class Plain:
    """All bits."""

    def encode(self, row: Tensor) -> list[Tensor]:
        return [row]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        return sent[0]


class BFloat16:
    """Two bytes a number: the range of float32 with 8 bits of precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._error: Tensor | None = None

    def encode(self, row: Tensor) -> list[Tensor]:
        wanted = row if self._error is None else row + self._error
        sent = [wanted.bfloat16()]
        self._error = wanted - self.decode(sent)
        return sent

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        return sent[0].to(self._dtype)


class Int8:
    """One byte a number, and four for the scale of each tensor: its largest entry is 127."""

    def __init__(self, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        self._dtype = dtype
        self._sizes = list(sizes)
        self._error: Tensor | None = None

    def encode(self, row: Tensor) -> list[Tensor]:
        wanted = row if self._error is None else row + self._error
        largest = torch.stack([part.abs().max() for part in wanted.split(self._sizes)])
        scales = (largest / 127).float()
        steps = self._per_number(scales).to(self._dtype)
        numbers = torch.where(steps > 0, wanted / steps, 0.0).round().clamp(-127, 127)
        sent = [numbers.to(torch.int8), scales]
        self._error = wanted - self.decode(sent)
        return sent

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        numbers, scales = sent
        return numbers.to(self._dtype) * self._per_number(scales).to(self._dtype)

    def _per_number(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(torch.tensor(self._sizes, device=scales.device))


def codec_for(compress: str | None, dtype: torch.dtype, sizes: Sequence[int]) -> Codec:
    if compress == "int8":
        return Int8(dtype, sizes)
    return BFloat16(dtype) if compress == "bf16" else Plain()
