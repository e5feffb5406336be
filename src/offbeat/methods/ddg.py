"""DDG: decoupled backward with delayed gradients; PipeDream's weights, locked forward."""

from dataclasses import dataclass

from offbeat.methods.base import Asynchronous


@dataclass(frozen=True)
class DDG(Asynchronous):
    """The forward runs through all stages, then all backwards run side by side.

    Update: PipeDream's, weight for weight; the forward lock changes time only.
    Lag: ``K-1-k``. Memory: lag + 1 weight copies, as many graphs.
    Reference: Huo et al. 2018, "Decoupled Parallel Backpropagation with Convergence Guarantee".

    >>> DDG().schedule(3).lags
    (2, 1, 0)
    """

    name = "ddg"
    title = "DDG"
    lag_formula = "K-1-k"
    copies = "lag + 1"
    waits_for = "the forward pass"
    reference = "Huo et al. 2018, arXiv 1804.10574"
    in_flight_per_hop = 1
    lockstep = True
