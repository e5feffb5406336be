"""A model whose forward and backward are replayed as CUDA graphs: small batches launch slowly."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Graphed(nn.Module):
    """Captures its network at the first training forward; evaluation runs as usual.

    Each copy captures its own graphs, since a graph is tied to the place of its weights, which
    offbeat's averages and torch's optimizers all write in place.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._captured = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self._captured:
            self._capture(x)
        output: Tensor = self.net(x)
        return output

    def _capture(self, x: Tensor) -> None:
        buffers = list(self.net.buffers())
        before = [buffer.clone() for buffer in buffers]
        torch.cuda.make_graphed_callables(self.net, (x.detach().clone(),))
        for buffer, values in zip(buffers, before, strict=True):  # warm-up moved the statistics
            buffer.copy_(values)
        self._captured = True


def largest_difference(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Gradients and statistics, graphed against plain, over two batches: the norm of the
    difference over the norm, the worst of both."""
    plain, graphed = deepcopy(net), Graphed(deepcopy(net))
    for model in (plain, graphed):
        for inputs in (x, x.flip(0) * 0.5):
            model.zero_grad()
            F.cross_entropy(model(inputs), y).backward()
    pairs = []
    for expected, found in (
        ([p.grad for p in plain.parameters()], [p.grad for p in graphed.parameters()]),
        (list(plain.buffers()), list(graphed.buffers())),
    ):
        pairs.append([_row(values) for values in (expected, found)])
    return max(float((found - row).norm() / row.norm()) for row, found in pairs)


def _row(values: list[Tensor | None] | list[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in values if value is not None])
