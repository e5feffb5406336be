"""Batches with a position that can be saved: every batch is keyed by (seed, epoch, number)."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from offbeat.errors import ConfigurationError
from offbeat.methods.base import require_count

Batch = tuple[Tensor, Tensor]


class Source(Protocol):
    """One part of a data set, held in memory of one device."""

    def __len__(self) -> int:
        """How many rows it has."""

    def to(self, device: torch.device | str) -> Self:
        """The same rows on a device."""

    def count(self, size: int, *, train: bool, drop_last: bool) -> int:
        """How many batches of ``size`` rows make an epoch."""

    def batch(
        self, size: int, number: int, *, train: bool, augment: bool, seed: int, epoch: int
    ) -> Batch:
        """One batch: a function of its arguments, whatever was read before."""


class Loader:
    """Iterates over one epoch after the other, and knows where it is.

    ``for x, y in loader`` runs to the end of the present epoch, from wherever it stands; the next
    ``for`` is the next epoch. ``len`` is the number of batches of one such pass.

    Under ``torchrun`` the stages in the middle read no data, so their loaders stand still. Call
    ``seek(epoch)`` in every process at the start of an epoch to keep them together.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        train: bool = True,
        seed: int = 0,
        augment: bool = True,
        drop_last: bool = False,
    ) -> None:
        require_count("batch_size", batch_size)
        self.batch_size, self.seed = batch_size, seed
        self.batches_per_epoch = source.count(batch_size, train=train, drop_last=drop_last)
        if not self.batches_per_epoch:
            raise ConfigurationError(
                f"{len(source)} rows make no batch of {batch_size}: give a smaller batch_size, or"
                " drop_last=False."
            )
        self.epoch = 0
        self.position = 0
        """The batch of this epoch that comes next."""
        self._begin = 0
        self._train = train
        self._read = partial(source.batch, batch_size, train=train, augment=augment, seed=seed)

    def __len__(self) -> int:
        return self.batches_per_epoch - self._begin

    def __iter__(self) -> Iterator[Batch]:
        self._begin = self.position
        try:
            while self.position < self.batches_per_epoch:
                batch = self.read(self.epoch, self.position)
                self.position += 1
                yield batch
            if self._train:
                self.epoch += 1
            self.position = 0
        finally:
            self._begin = self.position

    def read(self, epoch: int, number: int) -> Batch:
        """Any batch of any epoch; the position stays."""
        return self._read(number, epoch=epoch)

    def seek(self, epoch: int, position: int = 0) -> None:
        """Goes to a batch of an epoch; the end of one epoch is the start of the next."""
        if epoch < 0 or not 0 <= position <= self.batches_per_epoch:
            raise ConfigurationError(
                f"seek(epoch={epoch}, position={position}): epochs count from 0, and an epoch has"
                f" {self.batches_per_epoch} batches."
            )
        after, position = divmod(position, self.batches_per_epoch)
        self.epoch, self.position, self._begin = epoch + after, position, position

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch lies. Save it with the model."""
        names = ("epoch", "position", "seed", "batch_size")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; the batches from there are those that were not yet read."""
        for name in ("seed", "batch_size"):
            if state[name] != getattr(self, name):
                raise ConfigurationError(
                    f"the saved position belongs to a loader with {name}={state[name]}, this one"
                    f" has {name}={getattr(self, name)}: its batches are others. Build it with"
                    f" {name}={state[name]}."
                )
        self.seek(state["epoch"], state["position"])
