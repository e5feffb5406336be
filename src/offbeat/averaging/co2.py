"""CO2: an outer momentum over averages that are one round late."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_positive, require_share
from offbeat.averaging.outer import LateStep, Outer


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
        return Plan(every=self.every, delay=self.every, outer=self._late)

    def _late(self, start: Tensor, _replicas: int) -> Outer:
        return LateStep(start, self.outer_lr, self.outer_momentum, self.penalty, self.clip)
