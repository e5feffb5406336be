"""Norms of gradients: one stage's own, or those of all stages of a model together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Norms(NamedTuple):
    """One number per gradient of a stage, in the order of its parameters."""

    values: Tensor
    missing: list[int]
    """The places of the model's parameters that have no gradient."""


def norms_of(parameters: Sequence[nn.Parameter], of_model: int, device: torch.device) -> Norms:
    """``of_model``: how many of the parameters are the model's; the rest are a head's."""
    found = [p.grad for p in parameters if p.grad is not None]
    missing: list[int] = []
    if len(found) < len(parameters):
        missing = [place for place, p in enumerate(parameters[:of_model]) if p.grad is None]
    gradients = [g.coalesce().values() if g.is_sparse else g for g in found]
    if not gradients:
        return Norms(torch.zeros(0, device=device), missing)
    return Norms(torch.stack(torch._foreach_norm(gradients)), missing)


def total_of(norms: Sequence[Norms], order: Sequence[int] | None) -> Tensor | None:
    """The norm of all together; None if there is no gradient.

    ``order``: where the parameters of the unsplit model, in its order, come in ``norms``. Sums of
    squares go by it, as the unsplit model's do.
    """
    values = [stage.values for stage in norms if stage.values.numel()]
    if not values:
        return None
    together = torch.cat(values)
    if order is not None:
        together = together[_of_gradients(norms, order)]
    total: Tensor = torch.linalg.vector_norm(together)
    return total


def _of_gradients(norms: Sequence[Norms], order: Sequence[int]) -> list[int]:
    """The same order for those parameters alone that have a gradient."""
    if not any(stage.missing for stage in norms):
        return list(order)
    missing: set[int] = set()
    first = 0
    for stage in norms:
        missing |= {first + place for place in stage.missing}
        first += stage.values.numel() + len(stage.missing)
    number = {place: n for n, place in enumerate(p for p in range(first) if p not in missing)}
    return [number[place] for place in order if place not in missing]
