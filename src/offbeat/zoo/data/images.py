"""Images held as bytes on their device; augmented and normalised there, a batch at a time."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from offbeat.rng import generator
from offbeat.zoo.data.loader import Batch


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A random crop of the image with a black border of ``pad`` pixels; a mirror image or not."""

    pad: int = 0
    flip: bool = False

    def __call__(self, pixels: Tensor, random: torch.Generator) -> Tensor:
        """Draws on the CPU, so that every device sees the same images."""
        rows, _, height, width = pixels.shape
        device = pixels.device
        if self.pad:
            down, right = torch.randint(2 * self.pad + 1, (2, rows), generator=random).to(device)
            bordered = F.pad(pixels, (self.pad,) * 4)
            windows = bordered.unfold(2, height, 1).unfold(3, width, 1)  # views, nothing is copied
            pixels = windows[torch.arange(rows, device=device), :, down, right]
        if self.flip:
            mirrored = torch.rand(rows, generator=random) < 0.5
            pixels = torch.where(mirrored.to(device)[:, None, None, None], pixels.flip(3), pixels)
        return pixels


class Scale(NamedTuple):
    """Mean and deviation of a byte: one number, or one per channel."""

    mean: Tensor
    deviation: Tensor


class Images:
    """Pixels (rows, channels, height, width) as bytes, and a class number per row."""

    def __init__(
        self, pixels: Tensor, labels: Tensor, scale: Scale, augmentation: Augmentation | None = None
    ) -> None:
        self.pixels, self.labels = pixels, labels
        self.scale = Scale(*(number.reshape(-1, 1, 1) for number in scale))
        self.augmentation = augmentation
        self._order: tuple[tuple[int, int], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(
            self.pixels.to(device),
            self.labels.to(device),
            Scale(*(number.to(device) for number in self.scale)),
            self.augmentation,
        )

    def count(self, size: int, *, train: bool, drop_last: bool) -> int:  # noqa: ARG002
        return len(self) // size if drop_last else -(-len(self) // size)

    def batch(
        self, size: int, number: int, *, train: bool, augment: bool, seed: int, epoch: int
    ) -> Batch:
        part = slice(number * size, (number + 1) * size)
        rows = self._shuffled(seed, epoch)[part] if train else part
        pixels = self.pixels[rows]
        if augment and self.augmentation is not None:
            pixels = self.augmentation(pixels, generator("augment", seed, epoch, number))
        return (pixels.float() - self.scale.mean) / self.scale.deviation, self.labels[rows]

    def _shuffled(self, seed: int, epoch: int) -> Tensor:
        """The order of an epoch; the last one is kept, for an epoch is read batch by batch."""
        if self._order is None or self._order[0] != (seed, epoch):
            order = torch.randperm(len(self), generator=generator("epoch", seed, epoch))
            self._order = (seed, epoch), order.to(self.pixels.device)
        return self._order[1]


def hold_out(rows: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """The rows to train and those to test with, at least one of each."""
    order = torch.randperm(rows, generator=generator("split", seed))
    count = min(rows - 1, max(1, round(rows * share)))
    return order[count:], order[:count]


def scale_of(pixels: Tensor) -> Scale:
    """Of every channel, counted byte by byte: exact, and small in memory."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.zeros(pixels.size(1), 256, dtype=torch.float64)
    for count, channel in zip(counts, pixels.unbind(1), strict=True):
        for part in channel.split(4096):
            count += torch.bincount(part.flatten(), minlength=256)
    shares = counts / counts.sum(1, keepdim=True)
    mean = (shares * values).sum(1)
    variance = (shares * (values - mean[:, None]) ** 2).sum(1)
    return Scale(mean.float(), variance.sqrt().clamp(min=1.0).float())
