"""The Triton kernels of benchmarks/accuracy, held against PyTorch's own in full precision."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from benchmarks.accuracy import convolutions, norms
from benchmarks.accuracy.kernels import MOST_ERROR, draws, in_triton

GPU = torch.device("cuda")
KERNELS = pytest.mark.parametrize("kernels", [convolutions, norms], ids=["convolutions", "norms"])


@KERNELS
def test_triton_kernels_are_exact_up_to_rounding(kernels: ModuleType) -> None:
    """Outputs and all gradients, over all shapes in use."""
    assert in_triton(draws(GPU)(1)), "this would compare PyTorch's operations with themselves"
    assert 0 < kernels.largest_error(GPU) < MOST_ERROR


@KERNELS
def test_triton_kernels_give_the_same_bits_every_time(kernels: ModuleType) -> None:
    assert kernels.largest_error(GPU) == kernels.largest_error(GPU)


def test_triton_kernels_give_the_same_outputs_when_a_graph_is_replayed() -> None:
    """As recorded stages run them."""
    drawn = draws(GPU)
    x, weight = drawn(8, 3 * 16, 8, 8), drawn(3, 3, 3, 16, 32).float()
    expected = convolutions.conv3x3(x, weight, 1)  # which also builds the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = convolutions.conv3x3(x, weight, 1)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
