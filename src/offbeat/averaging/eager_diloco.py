"""Eager DiLoCo: a replica's own share of the average is fresh, the others' one round late."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.base import Plan
from offbeat.averaging.diloco import OuterSettings
from offbeat.averaging.outer import EagerStep, Outer


@dataclass(frozen=True)
class EagerDiLoCo(OuterSettings):
    """Outer steps that never wait: ``D_i/R + (mean of last round's D - own of it/R)``.

    D_i is what replica i changed in the round that ends. Replicas and their outer momentum differ
    by the part that is not shared yet; in the first round the others' share is zero. One replica is
    DiLoCo. Reference: Kale, Douillard, Donchev, "Eager Updates for Overlapped Communication and
    Computation in DiLoCo" (arXiv 2502.12996).
    """

    name = "eager-diloco"
    title = "Eager DiLoCo"
    reference = "Kale et al. 2025, arXiv 2502.12996"

    @property
    def bears_missing_replicas(self) -> bool:
        """No: what a replica's own share is goes by their number."""
        return False

    def plan(self) -> Plan:
        return Plan(every=self.every, delay=self.every, outer=self._eager)

    def _eager(self, start: Tensor, replicas: int) -> Outer:
        return EagerStep(start, replicas, self.outer_lr, self.outer_momentum, self.nesterov)
