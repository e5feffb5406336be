"""DDG: decoupled backward with delayed gradients; PipeDream's weights, locked forward."""

from dataclasses import dataclass, replace

from offbeat.methods.base import Asynchronous, one_way
from offbeat.schedules.schedule import Schedule


@dataclass(frozen=True)
class DDG(Asynchronous):
    """The forward runs through all stages, then all backwards run side by side.

    Update: PipeDream's, weight for weight; the forward lock changes time only.
    Lag: ``K-1-k``. Memory: lag + 1 weight copies, as many graphs.
    Reference: Huo et al., "Decoupled Parallel Backpropagation with Convergence Guarantee", 2018
    (arXiv 1804.10574).

    >>> DDG().schedule(3).lags
    (2, 1, 0)
    """

    name = "ddg"
    title = "DDG"
    lag_formula = "K-1-k"
    copies = "lag + 1"
    waits_for = "the forward pass"
    reference = "Huo et al. 2018, arXiv 1804.10574"

    def depths(self, stages: int) -> tuple[int, ...]:
        return one_way(stages)

    def schedule(self, stages: int) -> Schedule:
        return replace(super().schedule(stages), lockstep=True)
