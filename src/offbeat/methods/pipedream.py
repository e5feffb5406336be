"""PipeDream: endless 1F1B with stashed weights."""

from dataclasses import dataclass

from offbeat.methods.base import Asynchronous


@dataclass(frozen=True)
class PipeDream(Asynchronous):
    """1F1B without a flush; each backward uses the weights its forward read.

    Update: ``W_k[n+1] = Opt(W_k[n], g_k)`` with g the exact gradient at the point
    ``(W_0[n-m_0], ..., W_(K-1)[n])``.
    Lag: ``K-1-k``. Memory: lag + 1 weight copies, as many graphs.
    Reference: Narayanan et al., "PipeDream", SOSP 2019 (arXiv 1806.03377).

    >>> PipeDream().schedule(4).lags
    (3, 2, 1, 0)
    """

    name = "pipedream"
    title = "PipeDream"
    lag_formula = "K-1-k"
    copies = "lag + 1"
    waits_for = "nothing, but no slack per hop"
    reference = "Narayanan et al. 2019, arXiv 1806.03377"
    in_flight_per_hop = 1
