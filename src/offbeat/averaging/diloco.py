"""DiLoCo: an outer optimizer steps along what the replicas learnt on average."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_positive, require_share
from offbeat.averaging.outer import Outer, Step


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

    def _step(self, start: Tensor, _replicas: int) -> Outer:
        return Step(start, self.outer_lr, self.outer_momentum, self.nesterov)


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
        return Plan(every=self.every, outer=self._step)
