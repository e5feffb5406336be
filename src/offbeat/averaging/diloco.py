"""DiLoCo: an outer optimizer steps along what the replicas learnt on average."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_positive, require_share
from offbeat.averaging.outer import Outer


@dataclass(frozen=True, kw_only=True)
class OuterSettings(Periodic):
    """What the DiLoCos share: SGD with momentum over the average change of a round."""

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("outer_lr", self.outer_lr)
        require_share("outer_momentum", self.outer_momentum, "usually 0.9")


class Step(Outer):
    """X is one step of an outer optimizer from the last X, along the average change since."""

    sends = "changes"
    remembers: ClassVar[tuple[str, ...]] = ("_base", "_velocity")

    def __init__(self, start: Tensor, _replicas: int, *, settings: OuterSettings) -> None:
        self._base = start
        self._velocity = torch.zeros_like(start)
        self._settings = settings

    def part(self, now: Tensor) -> Tensor:
        return self._base - now

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        self._base = self._stepped(mean)
        return self._base

    def _stepped(self, change: Tensor) -> Tensor:
        momentum = self._settings.outer_momentum
        self._velocity = momentum * self._velocity + change
        ahead = change + momentum * self._velocity if self._settings.nesterov else self._velocity
        return self._base - self._settings.outer_lr * ahead

    def settle(self, weights: Tensor) -> None:
        self._base = weights


@dataclass(frozen=True)
class DiLoCo(OuterSettings):
    """``every`` local updates, then ``X <- OuterOpt(X, X - mean of x)`` and all restart from X.

    Everybody waits for the average. Memory: two more copies of the weights. Reference: Douillard
    et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105).
    """

    name = "diloco"
    title = "DiLoCo"
    reference = "Douillard et al. 2023, arXiv 2311.08105"

    def plan(self) -> Plan:
        return Plan(every=self.every, outer=partial(Step, settings=self))
