"""Work that takes time and no core: a forward that sleeps, and a backward that does so twice."""

import time
from typing import Any

import torch
from torch import Tensor


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def slept(x: Tensor, seconds: float) -> Tensor:
    """The same values, later; what ``x`` was made of waits for its gradient as well."""
    y: Tensor = _Sleep.apply(x, seconds)  # type: ignore[no-untyped-call]
    return y
