"""Features Replay: keep inputs instead of graphs, compute again at the newest weights."""

from dataclasses import dataclass, field

from offbeat.methods.base import Asynchronous, Rule


@dataclass(frozen=True)
class FeaturesReplay(Asynchronous):
    """Like DDG, but the backward recomputes the stage from its stored input.

    Update: ``W_k[n+1] = Opt(W_k[n], g_k)``, g by the chain rule through ``f_k(h_k(n); W_k[n])``.
    Lag: ``K-1-k``. Memory: one set of weights, lag + 1 stage inputs, one graph.
    Reference: Huo et al. 2018, "Training Neural Networks Using Features Replay".

    >>> FeaturesReplay().schedule(3).lags
    (2, 1, 0)
    """

    name = "features-replay"
    title = "Features Replay"
    lag_formula = "K-1-k"
    copies = "1"
    waits_for = "the forward pass"
    reference = "Huo et al. 2018, arXiv 1807.04511"
    in_flight_per_hop = 1
    lockstep = True

    backward: Rule = field(default="recompute", kw_only=True)
