"""The horizon that would have predicted best: least squares over the updates so far."""

import torch
from torch import Tensor, nn

from offbeat.corrections.groups import Tensors
from offbeat.corrections.sample import Sample

_DECAY = 0.98


class HorizonFit:
    """T minimising ``norm(w[t+D] - w[t] - T d[t])``: ``<w[t+D] - w[t], d[t]> / <d[t], d[t]>``.

    Both products are running means. A hundredth of the coordinates is enough for them, so that the
    history of D updates costs D / 50 copies of the weights instead of 2 D.
    """

    def __init__(self, parameters: tuple[nn.Parameter, ...], lag: int) -> None:
        self._parameters = parameters
        self._lag = lag
        self._sample = Sample(parameters)
        shape = (lag, self._sample.size)
        self._weights = parameters[0].detach().new_zeros(shape, dtype=self._sample.dtype)
        self._moves = torch.zeros_like(self._weights)
        # Rows of zeros, before there is a history, add nothing to either product.
        self._products = self._weights.new_zeros(2)

    def horizon(self, most: float) -> Tensor:
        """T for a micro-batch that will lag by ``most``; half of it while nothing is known."""
        along, square = self._products
        known = along / torch.where(square > 0, square, 1.0)
        return torch.where(square > 0, known, 0.5 * self._lag).clamp(0.0, most)

    def observe(self, displacements: Tensors) -> None:
        """Compares today's weights with the oldest forecast, and adds today's to the history."""
        weights, moves = self._sample.of(self._parameters), self._sample.of(displacements)
        then = self._moves[0]
        products = torch.stack([(weights - self._weights[0]) @ then, then @ then])
        self._products.lerp_(products, 1 - _DECAY)
        for history, newest in ((self._weights, weights), (self._moves, moves)):
            history.copy_(torch.cat([history[1:], newest[None]]))

    def memory(self) -> dict[str, Tensors]:
        return {"fit": (self._weights, self._moves, self._products)}
