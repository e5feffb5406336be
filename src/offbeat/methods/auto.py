"""The least staleness that keeps every stage busy, and what to do about the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from offbeat.errors import ConfigurationError
from offbeat.methods import DSP, Asynchronous, PipeDream, Synchronous
from offbeat.methods.base import Method, require_count
from offbeat.registry import Choice, Named
from offbeat.schedules.timeline import Costs, timeline

OptimizerKind = Literal["momentum", "adam", "muon", "other"]

_LEAST_ROWS, _LEAST_ROWS_OF_STATISTICS = 2, 8
"""Of a part; the latter where BatchNorm reads its statistics off a part. Measured were a GPT down
to one row and BatchNorm down to 16, which cost a ResNet-20 0.4 points: less than
whole batches do in four or eight stages."""
_MOST_LATE: dict[OptimizerKind, float] = {"momentum": 2.0, "adam": 0.5, "muon": 0.5, "other": 0.5}
"""Updates by which the parts of a batch may be late at the first stage, on average."""
_LEAST_PARTS = 8
"""As far as there are so many stages. With spike compensation an AlexNet in two stages lost 2.2
points with whole batches and none with two parts, a ResNet-20 in four 0.35 with two and 0.04 with
four (by the means of five seeds), in eight 0.11 with four and 0.02 with eight (of 37 seeds)."""
_SPIKE = (
    "spike compensation: a ResNet-20 in 8 parts (lag 1) and a ResNet-56 in 8 (lag 3) ended level"
    " with plain training; with whole batches half came back at a lag of 3, a third to a half at 7,"
    " an eighth to a quarter at 19; it keeps no copies of weights"
)
_SPIKE_MEASURED = 19
"""The largest lag at which that has been measured."""
_EXTRAPOLATE = (
    "extrapolate: a small GPT with 7 of 16 parts late by an update at its first stage ended below"
    " plain training's loss with it, with AdamW as with Muon; it keeps two copies of the weights"
)
_EXTRAPOLATE_LATE = (
    "extrapolate: with 7 of 8 parts late by an update it left a small GPT 0.06 nats (AdamW) or"
    " 0.005 (Muon) above plain training, 0.41 and 0.02 without it; it keeps two copies of the"
    " weights; larger batches would allow more parts"
)
_RATE_BY_LAG = (
    "rate-by-lag: at a lag of 7 a small GPT with Muon lost 0.35 nats with it and 0.62 without; it"
    " keeps no copies of weights; larger batches would allow more parts"
)
_RATE_MEASURED = 7
"""The smallest lag at which that has been measured; there extrapolating gave a fifth back."""
_NONE_HELPS = (
    "no correction: with AdamW and plain training's rate they were measured at lags of 7 and more,"
    " where none gave a small GPT back more than an eighth of what lag costs; larger batches would"
    " allow more parts"
)


@dataclass(frozen=True, kw_only=True)
class Auto:
    """``method="auto"`` with what it cannot find out by itself.

    ``hop``    time that a batch's activations take from a stage to the next, in units of one
               stage's forward and backward of that batch; 0 where messages are fast.
    ``batch``  rows of a batch (of one replica), so that micro-batches do not get too small.
    """

    hop: float = 0.0
    batch: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.hop, int | float) or isinstance(self.hop, bool) or not self.hop >= 0:
            raise ConfigurationError(
                f"hop={self.hop!r}: give the time of a message in units of a stage's work on one"
                " batch, a number of at least 0."
            )
        if self.batch is not None:
            require_count("batch", self.batch)


@dataclass(frozen=True)
class Plan:
    """A method, corrections as the command line spells them, and the reasons."""

    method: Method
    corrections: tuple[str, ...]
    reasons: tuple[str, ...]
    least_rows: int = 1
    """Of a part, for batches whose size nobody has said."""

    def with_own(self, corrections: Sequence[Named]) -> "Plan":
        """The same method with corrections that somebody else has chosen."""
        about_method = self.reasons[:-1] if len(self.reasons) > 1 else self.reasons
        names = tuple(str(Choice.of(correction)) for correction in corrections)
        reasons = (*about_method, "corrections as they were given")
        return replace(self, corrections=names, reasons=reasons)

    def __str__(self) -> str:
        """As ``--method`` and ``--correction`` would say it, and why."""
        chosen = " + ".join([str(Choice.of(self.method)), *self.corrections])
        return "\n".join([f"auto: {chosen}", *(f"  {reason}" for reason in self.reasons)])


def plan_for(
    stages: int,
    optimizer: OptimizerKind = "momentum",
    auto: Auto | None = None,
    *,
    batch_norm: bool = False,
) -> Plan:
    """What ``method="auto"`` means for this many stages and this kind of optimizer.

    >>> plan = plan_for(4)
    >>> plan.method.lags(4), plan.corrections
    ((1, 1, 1, 0), ('spike-compensation',))
    """
    require_count("stages", stages)
    auto = auto or Auto()
    if stages == 1:
        return Plan(
            Synchronous(), (), ("one stage has nothing to wait for: cut the model (stages=4)",)
        )
    least_rows = _LEAST_ROWS_OF_STATISTICS if batch_norm else _LEAST_ROWS
    room = None if auto.batch is None else max(1, auto.batch // least_rows)
    least = min(stages, _LEAST_PARTS)
    method, costs = _least_lag(stages, least, _MOST_LATE[optimizer], auto.hop, room)
    speed = timeline(method, stages, costs=costs).speed_up
    lags = method.lags(stages)
    reasons = [
        f"in flight per stage {_listed(method.depths(stages))}: the least that keeps all stages as"
        f" busy as they can be; modelled speed-up {speed:.2f} over one device",
        _why_parts(method, stages, least, _MOST_LATE[optimizer], auto.batch, least_rows),
        "stash: gradients are exact, at weights that are lag updates old",
    ]
    if batch_norm and (parts := method.micro_batches(stages)) > 1:
        reasons.append(_slow_statistics(parts))
    late = method.depths(stages)[0] / method.micro_batches(stages)
    corrections, why = _corrections_for(optimizer, lags[0], late)
    return Plan(method, corrections, (*reasons, why), least_rows)


def _least_lag(
    stages: int, least: int, most: float, hop: float, room: int | None
) -> tuple[Asynchronous, Costs]:
    """As few micro-batches in flight as can be, then as few per update as make the lag small."""
    parts = max(least, ceil((stages - 1) / most))
    for _ in range(3):  # messages are shorter for smaller parts, and depths with them
        parts = parts if room is None else min(parts, room)
        costs = Costs(hop=3.0 * hop / parts)
        depths = least_depths(stages, accumulate=parts, costs=costs)
        if parts == room or depths[0] <= most * parts:
            break
        parts = ceil(depths[0] / most)
    method: Asynchronous = PipeDream(accumulate=parts)
    if depths != method.depths(stages):
        method = DSP(lag=depths, backward="stash", accumulate=parts)
    return method, costs


def _why_parts(
    method: Asynchronous, stages: int, least: int, most: float, batch: int | None, least_rows: int
) -> str:
    parts, depth = method.micro_batches(stages), method.depths(stages)[0]
    text = f"lag per stage {_listed(method.lags(stages))} updates, with "
    text += f"every batch in {parts} parts" if parts > 1 else "whole batches"
    if parts < least or depth > most * parts:
        return (
            f"{text}: that costs accuracy, but more parts of {batch} rows would have fewer than"
            f" {least_rows} each; give larger batches if you can"
        )
    if depth <= most * (parts - 1):
        return f"{text}, as many as stages up to {_LEAST_PARTS}: fewer lost accuracy where measured"
    return (
        f"{text}: were there fewer, those of the first stage would be more than {most:g} updates"
        " late on average"
    )


def _slow_statistics(parts: int) -> str:
    return (
        f"BatchNorm's running statistics move with every part: a momentum of"
        f" {1 - 0.9 ** (1 / parts):.3f} for PyTorch's 0.1 keeps the pace they have with whole"
        " batches, which gave a ResNet-20 0.2 points in 8 parts without lag, 0.07 in 4 with it"
        " (docs/which-correction.md)"
    )


def _corrections_for(
    optimizer: OptimizerKind, lag: int, late: float
) -> tuple[tuple[str, ...], str]:
    """By name, and why: what docs/which-correction.md has measured, or what helped on either side.

    ``late``: updates by which the parts of the first stage are, on average.
    """
    if optimizer == "momentum" and lag <= _SPIKE_MEASURED:
        return ("spike-compensation",), _SPIKE
    if optimizer in ("adam", "muon"):
        if late <= _MOST_LATE[optimizer]:
            return ("extrapolate",), _EXTRAPOLATE
        if lag <= 1 or (optimizer == "muon" and lag < _RATE_MEASURED):
            return ("extrapolate",), _EXTRAPOLATE_LATE
        return (("rate-by-lag",), _RATE_BY_LAG) if optimizer == "muon" else ((), _NONE_HELPS)
    where = "for this optimizer" if optimizer == "other" else f"at a lag of {lag}"
    return (), f"no correction: none has been measured {where}; try extrapolate or predict"


def least_depths(
    stages: int, *, accumulate: int = 1, costs: Costs | None = None, tolerance: float = 0.02
) -> tuple[int, ...]:
    """The smallest in-flight depths at which the timing model loses at most ``tolerance`` of speed.

    >>> least_depths(4)
    (3, 2, 1, 0)
    >>> least_depths(4, costs=Costs(hop=0.5))
    (6, 4, 2, 0)
    """
    hops = stages - 1
    candidates = [*range(hops, 2 * hops + 1), *range(3 * hops, 8 * hops + 1, hops)]
    best = depths = (0,) * stages
    fastest = 0.0
    for first in candidates if hops else ():
        depths = tuple(first * (hops - stage) // hops for stage in range(stages))
        method = DSP(lag=depths, backward="stash", accumulate=accumulate)
        speed = timeline(method, stages, costs=costs).speed_up
        if speed >= (1 - tolerance) * _ideal(stages, costs):
            return depths
        if speed > fastest * (1 + tolerance):
            best, fastest = depths, speed
    return best


def _ideal(stages: int, costs: Costs | None) -> float:
    """The speed-up when the dearest stage never waits."""
    costs = costs or Costs()
    weights = [costs.weight(stage, stages) for stage in range(stages)]
    return sum(weights) / max(weights)


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
