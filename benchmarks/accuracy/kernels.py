"""What the kernels of ensembles share: Triton, where it is there, a layout, and how to check."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for the CPU comes without
    triton = tl = None

MOST_ERROR = 0.01
"""Of bfloat16 kernels against exact ones, relative."""

__all__ = ["MOST_ERROR", "channels_last", "draws", "error_of", "in_triton", "tl", "triton"]


def in_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype == torch.bfloat16


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def draws(device: torch.device) -> Callable[..., Tensor]:
    """Makes random tensors of any shape; of values that bfloat16 knows, so that nothing is rounded
    before it is compared."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    return drawn


def error_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the relative errors; infinite where something is not a number."""
    errors = torch.stack(
        [
            (one.detach().double() - other.detach()).norm() / other.detach().norm()
            for one, other in zip(found, exact, strict=True)
        ]
    )
    return float(errors.nan_to_num(nan=math.inf).max())
