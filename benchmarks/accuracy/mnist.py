"""MNIST held on the device as bytes; batches that depend on (seed, epoch) and nothing else."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MEAN, DEVIATION = 0.1307, 0.3081


class Mnist:
    """The four files as published, compressed or not."""

    def __init__(self, folder: Path, device: torch.device, *, rows: int) -> None:
        self._images = _images(folder, "train")[:rows].to(device)
        self._labels = _labels(folder, "train")[:rows].to(device)
        self._device = device
        images, labels = _images(folder, "t10k").to(device), _labels(folder, "t10k").to(device)
        self.test = [
            (_scaled(x), y) for x, y in zip(images.split(1000), labels.split(1000), strict=True)
        ]

    def __len__(self) -> int:
        return len(self._labels)

    def batches_of(
        self, seeds: Sequence[int], size: int, *, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch for every seed at once, shuffled; a short last batch is left out."""
        orders = []
        for seed in seeds:
            generator = torch.Generator(self._device).manual_seed(1_000_003 * seed + epoch)
            orders.append(torch.randperm(len(self), generator=generator, device=self._device))
        order = torch.stack(orders)
        for start in range(0, len(self) - size + 1, size):
            picked = order[:, start : start + size]
            yield _scaled(self._images[picked]), self._labels[picked]


def _scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / DEVIATION


def _images(folder: Path, split: str) -> Tensor:
    return torch.from_numpy(_bytes(folder, f"{split}-images-idx3-ubyte", 16)).view(-1, 1, 28, 28)


def _labels(folder: Path, split: str) -> Tensor:
    return torch.from_numpy(_bytes(folder, f"{split}-labels-idx1-ubyte", 8)).long()


def _bytes(folder: Path, name: str, header: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    packed, plain = folder / f"{name}.gz", folder / name
    if not packed.exists() and not plain.exists():
        raise SystemExit(f"{folder} has neither {packed.name} nor {plain.name} of MNIST.")
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    return np.frombuffer(data, np.uint8, offset=header).copy()
