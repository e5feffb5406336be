"""Many tensors as one row of numbers, and the mean of several rows, always in the same order."""

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """A row with all numbers, in float32 or, if any tensor has it, float64; sparse ones filled.

    ``into`` is an older row that nobody needs any more: fresh memory costs more than the copying.
    """
    dtype = dtype_of(tensors)
    return torch.cat(
        [tensor.detach().to_dense().reshape(-1).to(dtype) for tensor in tensors], out=into
    )


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """What a row of these tensors is computed in."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def unflatten(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The row's numbers in the shapes of ``like``."""
    pieces = row.split([tensor.numel() for tensor in like])
    return [piece.view(t.shape).to(t.dtype) for piece, t in zip(pieces, like, strict=True)]


@torch.no_grad()
def write(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, unflatten(row, tensors), strict=True):
        tensor.copy_(values)


def mean_of(rows: Sequence[Tensor], replicas: int) -> Tensor:
    """Summed one after the other: the same bits wherever it is computed."""
    if len(rows) == 1:
        return rows[0] / replicas
    total = rows[0] + rows[1]  # the rows themselves belong to the replicas
    for row in rows[2:]:
        total += row
    return total.div_(replicas)
