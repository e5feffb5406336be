"""What is compared: ways to train K stages, each with nothing tuned but what all share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offbeat.corrections import (
    Correction,
    DelayCompensation,
    Extrapolate,
    GapAware,
    LookAhead,
    MomentumByLag,
    Predict,
    RateByLag,
    Rewind,
    SpikeCompensation,
)
from offbeat.methods import ADL, Method, Phases, PipeDream, StaleWeights, Synchronous

TAIL = 0.1
"""The share of a run that a synchronous tail takes."""


@dataclass(frozen=True)
class Way:
    """A method for a run of so many updates, and its corrections."""

    method: Callable[[int], Method]
    corrections: Sequence[Correction] = ()


def _always(method: Method, *corrections: Correction) -> Way:
    return Way(lambda _: method, corrections)


def _then_synchronous(method: Method, *corrections: Correction, share: float = TAIL) -> Way:
    return Way(
        lambda updates: Phases((method, updates - int(share * updates)), (Synchronous(), None)),
        corrections,
    )


WAYS: dict[str, Way] = {
    "BP": _always(Synchronous()),
    # the two orders, the three rules
    "stale, current": _always(StaleWeights()),
    "stale, stash": _always(StaleWeights(backward="stash")),
    "stale, recompute": _always(StaleWeights(backward="recompute")),
    "1F1B, current": _always(PipeDream(backward="current")),
    "1F1B, stash": _always(PipeDream()),
    # accumulation at the same batch
    **{f"stale, M={m}": _always(ADL(accumulate=m)) for m in (2, 4, 8)},
    **{f"1F1B, M={m}": _always(PipeDream(accumulate=m)) for m in (2, 4, 8)},
    # each correction on the smaller lag
    "1F1B + predict geometric": _always(PipeDream(), Predict(horizon="geometric")),
    "1F1B + predict lag": _always(PipeDream(), Predict(horizon="lag")),
    "1F1B + predict fitted": _always(PipeDream(), Predict(horizon="fitted")),
    "1F1B + spike": _always(PipeDream(), SpikeCompensation()),
    "1F1B + predict + spike": _always(PipeDream(), Predict(), SpikeCompensation()),
    "1F1B + look-ahead": _always(PipeDream(), LookAhead()),
    "1F1B + extrapolate": _always(PipeDream(), Extrapolate()),
    "1F1B + delay compensation": _always(PipeDream(), DelayCompensation()),
    "1F1B + gap-aware": _always(PipeDream(), GapAware()),
    "1F1B + rate by lag": _always(PipeDream(), RateByLag()),
    "1F1B + momentum by lag": _always(PipeDream(), MomentumByLag()),
    "PipeMare": _always(
        StaleWeights(), RateByLag(plus=0, anneal=1000), Rewind()
    ),
    # combinations
    "1F1B, M=4 + spike": _always(PipeDream(accumulate=4), SpikeCompensation()),
    "1F1B, M=4 + predict": _always(PipeDream(accumulate=4), Predict()),
    "1F1B, M=8 + spike": _always(PipeDream(accumulate=8), SpikeCompensation()),
    # a synchronous end
    "stale, tail": _then_synchronous(StaleWeights()),
    "stale, half": _then_synchronous(StaleWeights(), share=0.5),
    "1F1B, tail": _then_synchronous(PipeDream()),
    "1F1B, M=4, tail": _then_synchronous(PipeDream(accumulate=4)),
    "1F1B, M=4 + spike, tail": _then_synchronous(PipeDream(accumulate=4), SpikeCompensation()),
    # what micro-batches do by themselves: BatchNorm sees fewer rows
    "BP, M=4": _always(ADL(accumulate=4, cap=0)),
}  # fmt: skip
