"""How stale a stage is, and how good its predictions are, on a sample of its coordinates."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from offbeat.corrections.base import Numbers, Surroundings
from offbeat.corrections.groups import Group, Tensors
from offbeat.corrections.sample import Sample
from offbeat.monitors.watch import Watch
from offbeat.records.readings import What

_DECAY = 0.9


class Staleness(Watch):
    """Staleness is ``lr / (1 - momentum) x curvature x lag``; plain momentum breaks down near 1.

    The lag is that of an update's parts on average, the curvature ``norm(g[t] - g[t-1]) /
    norm(w[t] - w[t-1])``. It counts the noise between batches, so it is an upper estimate.
    """

    needs_before = True

    def __init__(self, around: Surroundings, sample: Sample) -> None:
        super().__init__(around, sample)
        self._parameters = around.parameters
        first = around.parameters[0].detach()
        row = first.new_zeros(sample.size, dtype=sample.dtype)
        self._gradient = row
        self._moved = row.new_zeros(())
        """The square of the last update's norm; 0 before there is one."""
        self._squares = row.new_zeros(4)
        """Running means: change of the gradient, update, error predicted, error unpredicted."""

    def gradients(self, numbers: Numbers, read: Tensors | None) -> None:
        now = self.sample.of(
            tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters)
        )
        change = torch.where(self._moved > 0, (now - self._gradient).square().sum(), 0.0)
        self._squares[:2].lerp_(torch.stack([change, self._moved]), 1 - _DECAY)
        self._gradient.copy_(now)

    def judge(self, predicted: Tensor, read: Tensor) -> None:
        """Compares what a forward predicted, and what it read, with the weights of now."""
        now = self.sample.of(self._parameters)
        errors = [(guess - now).square().sum() for guess in (predicted, read)]
        self._squares[2:].lerp_(torch.stack(errors), 1 - _DECAY)

    def observe(self, before: Tensors | None) -> None:
        assert before is not None
        step = self.sample.of(self._parameters) - self.sample.of(before)
        self._moved.copy_(step.square().sum())

    def memory(self) -> dict[str, Tensors]:
        return {"watch": (self._gradient, self._moved, self._squares)}

    def readings(self) -> Iterator[tuple[What, float]]:
        change, moved, predicted, unpredicted = self._squares.tolist()
        rates = [_effective_rate(group) for group in self.around.groups if group.parameters]
        if moved > 0 and all(math.isfinite(rate) for rate in rates):
            yield "staleness", max(rates) * math.sqrt(change / moved) * self.late
        if unpredicted > 0:
            yield "prediction", math.sqrt(predicted / unpredicted)


def _effective_rate(group: Group) -> float:
    """How far one gradient moves the weights in the end, per unit of gradient; NaN if unknown.

    SGD: ``lr / (1 - momentum)``. Adam: its step's norm over that of the first moment.
    """
    if group.is_sgd:
        return float(group.lr) / (1 - (group.momentum or 0.0))
    found = group.with_state() if group.is_adam else ()
    if not found:
        return math.nan
    steps, moments = group.directions(found), group.first_moments(found)
    norms = [torch.stack(torch._foreach_norm(of)).norm() for of in (steps, moments)]
    return float(group.lr) * float(norms[0] / norms[1].clamp(min=torch.finfo(norms[1].dtype).tiny))
