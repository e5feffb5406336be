"""DSP: any lag per stage, slack per hop, one set of weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from offbeat.errors import ConfigurationError
from offbeat.methods.base import MOST, Asynchronous, Rule
from offbeat.schedules.schedule import Schedule


@dataclass(frozen=True)
class DSP(Asynchronous):
    """Diversely stale parameters: the backward recomputes from the stored input.

    Update: ``W_k[n+1] = Opt(W_k[n], g_k)``, g by the chain rule through ``f_k(h_k(n); W_k[n])``.
    Lag: ``lag``, by default ``2(K-1-k)``. Memory: one set of weights, lag + 1 stage inputs, one
    graph. Reference: Xu et al., "On the Acceleration of Deep Learning Model Parallelism with
    Staleness", CVPR 2020.

    ``lag``: K non-increasing integers. ``hop``: ticks of slack from a stage to the next. The
    gradient's way back takes the rest, ``lag[k] - lag[k+1] - hop[k]``. With ``hop`` alone both ways
    take it, and lag[k] is twice the sum of the hops after stage k.

    >>> DSP(hop=2).schedule(3).lags
    (8, 4, 0)
    >>> DSP(lag=(4, 2, 0), hop=(1, 1)) == DSP(lag=(4, 2, 0), hop=1)
    False
    >>> DSP(lag=(4, 2, 0), hop=(1, 1)).schedule(3) == DSP().schedule(3)
    True
    """

    name = "dsp"
    title = "DSP"
    lag_formula = "2(K-1-k) or any"
    copies = "1"
    waits_for = "nothing; hops absorb stragglers"
    reference = "Xu et al. 2020, arXiv 1909.02625"
    in_flight_per_hop = 2

    lag: Sequence[int] | None = field(default=None, metadata={"help": "lag of each stage."})
    hop: int | Sequence[int] | None = field(
        default=None, metadata={"help": "ticks per hop, one for all or K-1."}
    )
    backward: Rule = field(default="recompute", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lag is not None:
            object.__setattr__(self, "lag", _whole(self.lag, "lag"))
            lag = self.lag
            if any(low > high for high, low in pairwise(lag)):
                raise ConfigurationError(
                    f"DSP(lag={lag}): lags must not increase from stage to stage, because a stage"
                    f" waits at least as long as the next. Try lag={tuple(sorted(lag)[::-1])}."
                )
        if isinstance(self.hop, Sequence):
            object.__setattr__(self, "hop", _whole(self.hop, "hop"))
        elif self.hop is not None and not _is_whole(self.hop):
            raise ConfigurationError(
                f"DSP(hop={self.hop!r}): give an integer from 0 to {MOST}, or K-1 of them."
            )

    def depths(self, stages: int) -> tuple[int, ...]:
        if self.lag is not None:
            if len(self.lag) != stages:
                raise ConfigurationError(
                    f"DSP(lag={self.lag}) has {len(self.lag)} entries for {stages} stages: give one"
                    f" per stage, for example lag={super().depths(stages)}."
                )
            return tuple(self.lag)
        if self.hop is None:
            return super().depths(stages)
        hops = self._given_hops(stages)
        return tuple(2 * sum(hops[stage:]) for stage in range(stages))

    def _given_hops(self, stages: int) -> tuple[int, ...]:
        if not isinstance(self.hop, Sequence):
            return (self.hop or 0,) * (stages - 1)
        if len(self.hop) != stages - 1:
            raise ConfigurationError(
                f"DSP(hop={self.hop}) has {len(self.hop)} entries for {stages} stages: give one per"
                f" hop between neighbours, {stages - 1} of them."
            )
        return tuple(self.hop)

    def schedule(self, stages: int) -> Schedule:
        lag = self.capped_depths(stages)
        falls = [high - low for high, low in pairwise(lag)]
        half = tuple(ticks // 2 for ticks in falls)
        hops = half if self.hop is None else self._given_hops(stages)
        for stage, (hop, ticks) in enumerate(zip(hops, falls, strict=True)):
            if hop > ticks:
                raise ConfigurationError(
                    f"DSP(lag={lag}, hop={self.hop}): between stages {stage} and {stage + 1} the"
                    f" lag falls by {ticks}, all the ticks that both ways may take, and hop asks"
                    f" for {hop} one way. Lower hop[{stage}] or raise lag[{stage}]."
                )
        return replace(super().schedule(stages), hops=hops)


def _whole(values: Sequence[int], name: str) -> tuple[int, ...]:
    sequence = isinstance(values, Sequence) and not isinstance(values, str)
    if not sequence or not all(map(_is_whole, values)):
        raise ConfigurationError(
            f"DSP({name}={values!r}): give integers from 0 to {MOST} in a tuple, as in (4, 2, 0)."
        )
    return tuple(values)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST
