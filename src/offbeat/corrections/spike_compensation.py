"""Spike compensation: a late gradient gets at once the steps it has missed."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.corrections.base import Correction, Hook, Moment, Numbers, Surroundings
from offbeat.corrections.groups import Tensors
from offbeat.errors import ConfigurationError


@dataclass(frozen=True)
class SpikeCompensation(Correction):
    """Momentum spreads a gradient over many steps; the first D of them are made up for at once.

    SGD: ``v <- m v + g; w <- w - lr (a v + b g)``, ``a = m^D``, ``b = (1 - m^D) / (1 - m)``.
    Adam, AdamW: the same of the first moment, ``a m + (1 - a) g`` over the same denominator.
    D = 0 is the optimizer itself, D = 1 Nesterov's momentum.
    """

    name = "spike-compensation"
    title = "Spike compensation"
    acts_on = "step"
    memory = "0"
    reference = "Kosson et al. 2021, arXiv 2003.11666"

    def hook(self, around: Surroundings) -> "Spike":
        return Spike(self.name, around)


class Spike(Hook):
    """Rewrites a step of SGD, Adam or AdamW with more of the newest gradient in it."""

    repeats = True

    def __init__(self, name: str, around: Surroundings, *, most: int | None = None) -> None:
        for group in around.groups:
            known = (group.is_sgd and group.plain) or group.is_adam
            if not known:
                what = "with nesterov or dampening" if group.is_sgd else ""
                raise ConfigurationError(
                    f"{name} rewrites the steps of SGD, Adam and AdamW; stage {around.stage} has"
                    f" {group.optimizer_name} {what}".rstrip()
                    + ". Use plain momentum with it, or extrapolate, which takes any optimizer."
                )
        self._groups = [group for group in around.groups if group.has_direction]
        self._most = most
        self._newest: list[tuple[tuple[nn.Parameter, ...], Tensors]] = []

    def numbers(self, moment: Moment) -> Numbers:
        """Per group the rate times ``1 - a``, and the factor that makes g comparable with v."""
        lag = moment.lag if self._most is None else min(moment.lag, self._most)
        if lag == 0:
            return ()
        numbers: list[float | Tensor] = []
        for group in self._groups:
            momentum = group.momentum or 0.0
            numbers += [group.lr * (1 - momentum**lag), 1 / (1 - momentum) if group.is_sgd else 1.0]
        return numbers

    def before_step(self, numbers: Numbers) -> None:
        # With the weight decay of the weights as they are before the step.
        self._newest = [group.gradients() for group in self._groups] if numbers else []

    def after_step(self, numbers: Numbers, before: Tensors | None) -> None:
        for place, (parameters, gradients) in enumerate(self._newest):
            if not parameters:
                continue
            # a v + b g = v + (1 - a) (g / (1 - m) - v); Adam's moment has its (1 - m) already.
            group, (amount, scale) = self._groups[place], numbers[2 * place : 2 * place + 2]
            moments = group.first_moments(parameters)
            change = torch._foreach_sub(torch._foreach_mul(gradients, scale), moments)
            if group.is_adam:
                change = group.over_denominator(parameters, change)
            torch._foreach_sub_(parameters, torch._foreach_mul(change, amount))
        self._newest = []
