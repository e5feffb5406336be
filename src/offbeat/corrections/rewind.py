"""Rewinding: the backward sees an estimate of the weights its forward read."""

from dataclasses import dataclass

import torch

from offbeat.corrections.base import Correction, Hook, Surroundings, require_number
from offbeat.corrections.groups import Tensors
from offbeat.corrections.read_weights import refuse_holes
from offbeat.errors import ConfigurationError
from offbeat.methods.base import Rule


@dataclass(frozen=True)
class Rewind(Correction):
    """Backward weights are ``w - n delta``, n the updates since the forward: PipeMare's second.

    delta is a running mean of the updates, ``delta <- g delta + (1 - g) (w[t+1] - w[t])``,
    ``g = memory_at_lag**(1/D)``, so that an update D ago still weighs ``memory_at_lag``. It cures
    the difference between forward and backward weights, not the delay: for ``backward="current"``
    and ``"recompute"``.
    """

    name = "rewind"
    title = "Rewound backward weights"
    acts_on = "backward weights"
    memory = "2; in a backward: 1 more"
    reference = "Yang et al. 2021, arXiv 1910.05124"

    memory_at_lag: float = 0.135

    def __post_init__(self) -> None:
        require_number("Rewind", "memory_at_lag", self.memory_at_lag, above=0, most=1)

    def check_rule(self, rule: Rule, *, reads_old_versions: bool) -> None:
        if rule == "stash":
            raise ConfigurationError(
                "rewind estimates the weights that the forward read, and backward='stash' keeps"
                " them. Use backward='current' or 'recompute', or leave rewind out."
            )

    def hook(self, around: Surroundings) -> "Rewinding":
        refuse_holes(self.name, around)
        return Rewinding(self, around)


class Rewinding(Hook):
    needs_before = True

    def __init__(self, settings: Rewind, around: Surroundings) -> None:
        self._parameters = around.parameters
        self._kept = settings.memory_at_lag ** (1 / around.lag)
        self._delta = tuple(torch.zeros_like(p) for p in around.parameters)

    def backward_weights(self, behind: int) -> Tensors | None:
        if behind == 0:
            return None
        way = torch._foreach_mul(self._delta, float(behind))
        return torch._foreach_sub([p.detach() for p in self._parameters], way)

    def observe(self, before: Tensors | None) -> None:
        assert before is not None
        step = torch._foreach_sub(self._parameters, before)
        torch._foreach_lerp_(self._delta, step, 1 - self._kept)

    def memory(self) -> dict[str, Tensors]:
        return {"delta": self._delta}
