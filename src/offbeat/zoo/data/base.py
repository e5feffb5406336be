"""What training needs to know about data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.errors import ConfigurationError
from offbeat.zoo.data.loader import Loader, Source

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set in memory: its parts, the shape of a row, and the loss that goes with it.

    ``classes`` is set for images, ``vocabulary`` for text; the other one is None.
    """

    name: str
    train: Source
    test: Source
    validation: Source | None = None
    """A third part, where the data set is published with one."""
    shape: tuple[int, ...]
    """Of one row of x: (channels, side, side), or (context,)."""
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int | None = None
    vocabulary: int | None = None
    names: tuple[str, ...] = ()
    """Of the classes."""
    decode: Callable[[Any], str] | None = None
    """Text from token numbers."""

    def loader(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        augment: bool = True,
        drop_last: bool = False,
    ) -> Loader:
        """Training batches, shuffled and augmented by (seed, epoch, batch) alone."""
        return Loader(
            self.train.to(device), batch_size, seed=seed, augment=augment, drop_last=drop_last
        )

    def test_loader(
        self, batch_size: int, *, device: torch.device | str = "cpu", part: Part = "test"
    ) -> Loader:
        """All rows of a part in their order, as they are."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        source = parts.get(part)
        if source is None:
            known = ", ".join(name for name, there in parts.items() if there is not None)
            raise ConfigurationError(f"data {self.name!r} has no part {part!r}. It has: {known}.")
        return Loader(source.to(device), batch_size, train=False, augment=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What a network must fit, under the names of the networks' settings."""
        if self.vocabulary is not None:
            return {"vocabulary": self.vocabulary, "context": self.shape[0]}
        channels, side, width = self.shape
        inputs = channels * side * width
        return {"classes": self.classes, "channels": channels, "side": side, "inputs": inputs}
