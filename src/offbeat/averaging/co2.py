"""CO2: an outer momentum over averages that are one round late."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_positive, require_share
from offbeat.averaging.outer import Outer


@dataclass(frozen=True, kw_only=True)
class CO2(Periodic):
    """``m <- momentum m + (X - z)/penalty; X <- X - lr clip(m); x <- X`` at the end of each round.

    z is the average of the weights at the end of the round before, so nobody waits for it. At the
    first boundary there is none, and replicas go on unchanged. ``clip`` bounds every entry of m;
    the released program computes that bound and drops it. Reference: Sun et al., "CO2: Efficient
    Distributed Training with Full Communication-Computation Overlap", ICLR 2024 (arXiv 2401.16265).
    """

    name = "co2"
    title = "CO2"
    reference = "Sun et al. 2024, arXiv 2401.16265"

    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    penalty: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("outer_lr", self.outer_lr)
        require_share("outer_momentum", self.outer_momentum, "0.2 to 0.5 in the paper")
        require_positive("penalty", self.penalty)
        if self.clip is not None:
            require_positive("clip", self.clip)

    def plan(self) -> Plan:
        return Plan(every=self.every, delay=self.every, outer=partial(LateStep, settings=self))


class LateStep(Outer):
    """A step along the momentum of the gap to an average that is one round late."""

    sends_first = True
    remembers = ("_old", "_m")

    def __init__(self, start: Tensor, _replicas: int, *, settings: CO2) -> None:
        self._old = start
        self._m = torch.zeros_like(start)
        self._settings = settings

    @property
    def copy(self) -> Tensor:
        return self._old

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        own = self._settings
        self._m = own.outer_momentum * self._m + (self._old - mean) / own.penalty
        if own.clip is not None:
            self._m = self._m.clamp(-own.clip, own.clip)
        self._old = self._old - own.outer_lr * self._m
        return self._old

    def settle(self, weights: Tensor) -> None:
        self._old = weights
