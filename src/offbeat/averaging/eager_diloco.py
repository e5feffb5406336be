"""Eager DiLoCo: a replica's own share of the average is fresh, the others' one round late."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from offbeat.averaging.base import Plan
from offbeat.averaging.diloco import OuterSettings, Step


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
        outer = partial(EagerStep, settings=self)
        return Plan(every=self.every, delay=self.every, outer=outer)


class EagerStep(Step):
    """The step uses a replica's own fresh change, and the others' from one round ago.

    A part is taken right before the step below, which still needs what was sent the last time.
    """

    sends_first = True
    remembers = (*Step.remembers, "_sent")

    def __init__(self, start: Tensor, replicas: int, *, settings: OuterSettings) -> None:
        super().__init__(start, replicas, settings=settings)
        self._replicas = replicas
        self._sent: Tensor | None = None

    def target(self, mean: Tensor | None, now: Tensor) -> Tensor | None:
        own = self._base - now
        change = own / self._replicas
        if mean is not None and self._sent is not None:
            change = change + (mean - self._sent / self._replicas)
        self._sent = own
        self._base = self._stepped(change)
        return self._base

    def settle(self, weights: Tensor) -> None:
        super().settle(weights)
        self._sent = None
