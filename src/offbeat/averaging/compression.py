"""Fewer bytes on the wire: a flat vector as bf16, or as int8 with one scale per tensor.

What rounding leaves out is the sender's debt: it is remembered and added to the next message (error
feedback), so that small changes are late instead of lost.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging.stateful import Stateful


class Codec(Stateful):
    """Sends all bits. All that a codec remembers is what it owes to its next message."""

    width = 1
    """How many parts a vector has on the wire."""

    def encode(self, vector: Tensor) -> list[Tensor]:
        """What goes on the wire for a vector."""
        return [vector]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        """The vector as every replica reads it."""
        return sent[0]


class Rounding(Codec):
    """Sends fewer bits, and what they leave out with the next vector."""

    remembers = ("_debt",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._debt: Tensor | None = None

    def encode(self, vector: Tensor) -> list[Tensor]:
        wanted = vector if self._debt is None else vector + self._debt
        sent = self._rounded(wanted)
        self._debt = wanted - self.decode(sent)
        return sent

    @abstractmethod
    def _rounded(self, wanted: Tensor) -> list[Tensor]: ...


class BFloat16(Rounding):
    """Two bytes a number: the range of float32 with 8 bits of precision."""

    def _rounded(self, wanted: Tensor) -> list[Tensor]:
        return [wanted.bfloat16()]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        return sent[0].to(self._dtype)


class Int8(Rounding):
    """One byte a number, and four for the scale of each tensor: its largest entry is 127."""

    width = 2

    def __init__(self, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        super().__init__(dtype)
        self._sizes = tuple(sizes)

    def _rounded(self, wanted: Tensor) -> list[Tensor]:
        largest = torch.stack([part.abs().max() for part in wanted.split(self._sizes)])
        scales = (largest / 127).float()
        steps = self._per_number(scales).to(self._dtype)
        numbers = torch.where(steps > 0, wanted / steps, 0.0).round().clamp(-127, 127)
        return [numbers.to(torch.int8), scales]

    def decode(self, sent: Sequence[Tensor]) -> Tensor:
        numbers, scales = sent
        return numbers.to(self._dtype) * self._per_number(scales).to(self._dtype)

    def _per_number(self, scales: Tensor) -> Tensor:
        return scales.repeat_interleave(torch.tensor(self._sizes, device=scales.device))


def codec_for(compress: str | None, dtype: torch.dtype, sizes: Sequence[int]) -> Codec:
    if compress == "int8":
        return Int8(dtype, sizes)
    return BFloat16(dtype) if compress == "bf16" else Codec()
