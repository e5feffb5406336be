"""Many tensors as one flat vector, and the mean of several vectors, always in the same order."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """A vector of all numbers, in float32 or, if a tensor has it, float64; sparse ones filled.

    ``into`` is an older vector that nobody needs any more: fresh memory costs more than copying.
    """
    dtype = dtype_of(tensors)
    return torch.cat(
        [tensor.detach().to_dense().reshape(-1).to(dtype) for tensor in tensors], out=into
    )


def dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """What a vector of these tensors is computed in."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The vector's numbers in the shapes of ``like``."""
    pieces = vector.split([tensor.numel() for tensor in like])
    return [piece.view(t.shape).to(t.dtype) for piece, t in zip(pieces, like, strict=True)]


@torch.no_grad()
def write(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, unflatten(vector, tensors), strict=True):
        tensor.copy_(values)


def ordered_mean(vectors: Sequence[Tensor], replicas: int) -> Tensor:
    """Summed one after the other: the same bits wherever it is computed."""
    if len(vectors) == 1:
        return vectors[0] / replicas
    total = vectors[0] + vectors[1]  # the vectors themselves belong to the replicas
    for vector in vectors[2:]:
        total += vector
    return total.div_(replicas)
