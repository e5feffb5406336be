"""CIFAR-10 held on the device as bytes; batches that depend on (seed, epoch) and nothing else."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from benchmarks.averaging.pack import names_of
from torch import Tensor
from torch.nn import functional as F

PADDING, SIDE = 4, 32
MEAN = (0.49140, 0.48216, 0.44653)
DEVIATION = (0.24703, 0.24349, 0.26159)
PARTS = {"train": 5, "test": 1}


def parts_in(folder: Path) -> list[int]:
    """The training parts that are there."""
    return [
        number
        for number in range(PARTS["train"])
        if all((folder / name).exists() for name in names_of("train", number))
    ]


def rows_in(folder: Path) -> int:
    """Training images in a folder of parts, without reading them."""
    labels = [names_of("train", number)[1] for number in parts_in(folder)]
    return sum(len(np.load(folder / name, mmap_mode="r")) for name in labels)


class Cifar:
    """The training images, padded and ready to be cropped, and the test images as a loader."""

    def __init__(
        self, folder: Path, device: torch.device, *, rows: int, test_rows: int | None = None
    ) -> None:
        """``rows``: how many training images, from the first on."""
        images, labels = _read(folder, "train", parts_in(folder))
        self._images = F.pad(images[:rows].to(device), (PADDING,) * 4)
        self._labels = labels[:rows].to(device)
        self._device = device
        self._mean = torch.tensor(MEAN, device=device).view(3, 1, 1)
        self._deviation = torch.tensor(DEVIATION, device=device).view(3, 1, 1)
        images, labels = _read(folder, "test", [0])
        images, labels = images[:test_rows].to(device), labels[:test_rows].to(device)
        self.test = [
            (self._scaled(x), y)
            for x, y in zip(images.split(1000), labels.split(1000), strict=True)
        ]

    def __len__(self) -> int:
        return len(self._labels)

    def batches(self, size: int, *, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch, shuffled, cropped and flipped; a short last batch is left out."""
        for images, labels in self.batches_of([seed], size, epoch=epoch):
            yield images[0], labels[0]

    def batches_of(
        self, seeds: Sequence[int], size: int, *, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for many seeds at once, each as it would be alone: (seeds, rows, ...)."""
        device, rows = self._device, len(self)
        drawn: list[list[Tensor]] = [[], [], []]
        for seed in seeds:
            generator = torch.Generator(device).manual_seed(1_000_003 * seed + epoch)
            drawn[0].append(torch.randperm(rows, generator=generator, device=device))
            shape = (2, rows)
            drawn[1].append(
                torch.randint(2 * PADDING + 1, shape, generator=generator, device=device)
            )
            drawn[2].append(torch.rand(rows, generator=generator, device=device) < 0.5)
        order, shifts, flips = (torch.stack(found) for found in drawn)
        line = torch.arange(SIDE, device=device)
        channels = torch.arange(3, device=device).view(1, 1, 3, 1, 1)
        for start in range(0, rows - size + 1, size):
            here = slice(start, start + size)
            picked = order[:, here]
            down = shifts[:, 0, here, None] + line
            turned = torch.where(flips[:, here, None], line.flip(0), line)
            across = shifts[:, 1, here, None] + turned
            cropped = self._images[
                picked[:, :, None, None, None],
                channels,
                down[:, :, None, :, None],
                across[:, :, None, None, :],
            ]
            yield self._scaled(cropped), self._labels[picked]

    def _scaled(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self._mean) / self._deviation


def _read(folder: Path, split: str, numbers: list[int]) -> tuple[Tensor, Tensor]:
    if not numbers or not (folder / names_of(split, numbers[0])[0]).exists():
        raise SystemExit(
            f"{folder} has no {names_of(split, 0)[0]}: make the parts with"
            f" python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz {folder}"
        )
    names = [names_of(split, number) for number in numbers]
    images = np.concatenate([np.load(folder / name) for name, _ in names])
    labels = np.concatenate([np.load(folder / name) for _, name in names])
    return torch.from_numpy(images), torch.from_numpy(labels).long()
