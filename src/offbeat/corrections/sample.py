"""A fixed sample of a stage's coordinates: enough for norms and products."""

from functools import reduce

import torch
from torch import Tensor, nn

from offbeat.corrections.groups import Tensors

_ALL_UP_TO = 4096
"""Weights of a stage up to which none is left out."""
_SHARE = 0.01


class Sample:
    """The same coordinates in every engine: chosen by a generator of its own with a fixed seed."""

    def __init__(self, parameters: tuple[nn.Parameter, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        whole = sum(p.numel() for p in parameters) <= _ALL_UP_TO
        self._places = []
        for p in parameters:
            count = p.numel() if whole else max(1, round(_SHARE * p.numel()))
            chosen = torch.randperm(p.numel(), generator=generator)[:count].sort().values
            self._places.append(chosen.to(p.device))
        self.size = sum(places.numel() for places in self._places)
        self.dtype = reduce(torch.promote_types, (p.dtype for p in parameters))

    def of(self, tensors: Tensors) -> Tensor:
        """One row with the chosen coordinates of all tensors."""
        pairs = zip(tensors, self._places, strict=True)
        return torch.cat([t.detach().to_dense().reshape(-1)[at] for t, at in pairs])
