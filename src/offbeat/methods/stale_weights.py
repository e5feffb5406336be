"""StaleWeights: pipelined training without weight copies."""

from dataclasses import dataclass, field

from offbeat.methods.base import Asynchronous, Rule


@dataclass(frozen=True)
class StaleWeights(Asynchronous):
    """All three locks gone, no weight copies: old activations meet the newest weights.

    Update: ``W_k[n+1] = Opt(W_k[n], g_k)``, g with the activations of ``W_k[n-m_k]`` and ``W_k[n]``
    inside the vector-Jacobian products.
    Lag: ``2(K-1-k)``. Memory: one set of weights, lag + 1 graphs.
    Reference: Zhang, Abdelrahman, "Pipelined Training with Stale Weights of Deep Convolutional
    Neural Networks". Its hybrid scheme is :class:`offbeat.Phases`.

    >>> StaleWeights().schedule(4).lags
    (6, 4, 2, 0)
    """

    name = "stale-weights"
    title = "StaleWeights"
    lag_formula = "2(K-1-k)"
    copies = "1"
    waits_for = "nothing"
    reference = "Zhang, Abdelrahman 2019, arXiv 1912.12675"
    in_flight_per_hop = 2

    backward: Rule = field(default="current", kw_only=True)
