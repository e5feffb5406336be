"""Rows of bytes: the same for every way of a seed, and the same validation for everybody."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from benchmarks.language.pack import FILE
from torch import Tensor

VOCABULARY = 256
VALIDATION_SHARE = 0.05
Batch = tuple[Tensor, Tensor]


class Text:
    """A text on a device; its end is for validation."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        tokens = torch.from_numpy(np.load(folder / FILE)).to(device)
        kept = int(VALIDATION_SHARE * len(tokens))
        self._training, self._validation = tokens[:-kept], tokens[-kept:]

    def batches(
        self, *, updates: int, rows: int, context: int, seeds: Sequence[int]
    ) -> Iterator[Batch]:
        """(rows, networks, context), each network's from random places of its own.

        All at once on the device: a step then launches nothing.
        """
        last = len(self._training) - context - 1
        starts = [
            torch.randint(last, (updates, rows), generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
        return zip(*_rows(self._training, torch.stack(starts, 2), context), strict=True)

    def validation(self, *, batches: int, rows: int, context: int, networks: int) -> list[Batch]:
        """Rows from places that are evenly apart, the same for all networks."""
        last = len(self._validation) - context - 1
        starts = torch.linspace(0, last, batches * rows, dtype=torch.float64).long()
        places = starts.view(batches, rows, 1).expand(-1, -1, networks)
        x, y = _rows(self._validation, places, context)
        return list(zip(x, y, strict=True))


def _rows(tokens: Tensor, starts: Tensor, context: int) -> Batch:
    """Inputs and targets that begin at these places."""
    places = starts.to(tokens.device)[..., None] + torch.arange(context + 1, device=tokens.device)
    found = tokens[places].long()
    return found[..., :-1].contiguous(), found[..., 1:].contiguous()
