"""Delay compensation: a first-order guess of the gradient at the newest weights."""

from dataclasses import dataclass

import torch

from offbeat.corrections.base import Correction, Hook, Moment, Numbers, Surroundings, require_number
from offbeat.corrections.groups import Tensors, with_gradients
from offbeat.corrections.read_weights import refuse_maximizing, refuse_recompute
from offbeat.methods.base import Rule

_DECAY, _EPS = 0.95, 1e-7


@dataclass(frozen=True)
class DelayCompensation(Correction):
    """``g <- g + strength g g (w_now - w_read)``, elementwise; g g stands for the Hessian.

    ``adaptive=True`` divides the strength by ``sqrt(mean of g^2)``, a running mean (DC-ASGD-a).
    w_read is what the forward read; of several micro-batches in an update, its mean over them.
    """

    name = "delay-compensation"
    title = "Delay compensation"
    acts_on = "gradients"
    memory = "D + 1; adaptive, micro-batches: 1 more each"
    reference = "Zheng et al. 2017, arXiv 1609.08326"

    strength: float = 1.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        require_number("DelayCompensation", "strength", self.strength, above=0)

    def check_rule(self, rule: Rule, *, reads_old_versions: bool) -> None:
        refuse_recompute(self.name, rule)

    def hook(self, around: Surroundings) -> "Compensation":
        refuse_maximizing(self.name, around)
        return Compensation(self, around)


class Compensation(Hook):
    needs_read = True

    def __init__(self, settings: DelayCompensation, around: Surroundings) -> None:
        self._strength = settings.strength
        self._parameters = around.parameters
        adaptive = settings.adaptive
        self._squares = tuple(torch.zeros_like(p) for p in around.parameters) if adaptive else ()

    def numbers(self, moment: Moment) -> Numbers:
        return [self._strength] if moment.lag else ()

    def gradients(self, numbers: Numbers, read: Tensors | None) -> None:
        assert read is not None
        places, weights, gradients = with_gradients(self._parameters)
        if not places:
            return
        if self._squares:
            squares = [self._squares[place] for place in places]
            torch._foreach_mul_(squares, _DECAY)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - _DECAY)
        if not numbers:
            return
        change = torch._foreach_sub(weights, [read[place] for place in places])
        change = torch._foreach_mul(change, torch._foreach_mul(gradients, gradients))
        if self._squares:
            roots = torch._foreach_sqrt(torch._foreach_add(squares, _EPS))
            change = torch._foreach_div(change, roots)
        torch._foreach_add_(gradients, torch._foreach_mul(change, numbers[0]))

    def memory(self) -> dict[str, Tensors]:
        return {"squares": self._squares}
