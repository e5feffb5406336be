"""The least staleness that keeps every stage busy, and what to do about the rest."""

import logging
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal, TextIO

from offbeat.errors import ConfigurationError
from offbeat.methods import DSP, Asynchronous, PipeDream, Synchronous
from offbeat.methods.base import Method, require_count
from offbeat.registry import Choice, Named
from offbeat.schedules.timeline import Costs, timeline

OptimizerKind = Literal["momentum", "adam", "muon", "nesterov", "other"]
"""``nesterov``: SGD with ``nesterov=True`` and NAdam, which look ahead by themselves."""
log = logging.getLogger("offbeat.auto")


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

    def announce(self) -> None:
        """Logs it, at level INFO. Where nobody has set up logging it is shown on stderr."""
        silent = logging.getLogger("offbeat").level > logging.INFO
        with nullcontext() if silent or log.hasHandlers() else show_on(sys.stderr):
            log.info("%s", self)


@contextmanager
def show_on(stream: TextIO) -> Iterator[None]:
    """Where what "auto" chooses is to be read, without a word on how to log anything else."""
    handler, level = logging.StreamHandler(stream), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


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
        return Plan(Synchronous(), (), (sentence("one_stage"),))
    least_rows = limit("least_rows_with_batch_norm" if batch_norm else "least_rows")
    room = None if auto.batch is None else max(1, auto.batch // least_rows)
    least, most = min(stages, limit("least_parts")), limit("most_late")[optimizer]
    method, costs = _least_lag(stages, least, most, auto.hop, room)
    speed = timeline(method, stages, costs=costs).speed_up
    reasons = [
        sentence("in_flight", depths=" ".join(map(str, method.depths(stages))), speed=speed),
        _why_parts(method, stages, least, most, auto.batch, least_rows),
        sentence("stash"),
    ]
    if batch_norm and (parts := method.micro_batches(stages)) > 1:
        reasons.append(sentence("statistics", momentum=1 - 0.9 ** (1 / parts)))
    late = method.depths(stages)[0] / method.micro_batches(stages)
    lag = method.lags(stages)[0]
    corrections, why = corrections_for(optimizer, lag, on_time=late <= most)
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
    if parts < least or depth > most * parts:
        why = sentence("fewer_parts", batch=batch, least_rows=least_rows)
    elif depth <= most * (parts - 1):
        why = sentence("least_parts", least_parts=limit("least_parts"))
    else:
        why = sentence("late_parts", most=most)
    split = f"every batch in {parts} parts" if parts > 1 else "whole batches"
    return sentence("lag", lags=" ".join(map(str, method.lags(stages))), split=split, why=why)


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
    weights = (costs or Costs()).weights(stages)
    never_waits = sum(weights) / max(weights)  # the speed-up when the dearest stage never does
    best = depths = (0,) * stages
    fastest = 0.0
    for first in candidates if hops else ():
        depths = tuple(first * (hops - stage) // hops for stage in range(stages))
        method = DSP(lag=depths, backward="stash", accumulate=accumulate)
        speed = timeline(method, stages, costs=costs).speed_up
        if speed >= (1 - tolerance) * never_waits:
            return depths
        if speed > fastest * (1 + tolerance):
            best, fastest = depths, speed
    return best


@cache
def load_findings() -> dict[str, Any]:
    """What has been measured, and the limits and words of "auto" that follow."""
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def limit(name: str) -> Any:
    """What bounds the choice of ``auto``: rows and parts, and how late parts may be."""
    return load_findings()["limits"][name]


def sentence(name: str, **facts: object) -> str:
    """A sentence with the figures of the findings and the facts of the case at hand in it."""
    figures = {key: finding["figures"] for key, finding in load_findings()["findings"].items()}
    text: str = load_findings()["sentences"][name]
    return text.format(**figures, **facts)


def corrections_for(optimizer: str, lag: int, *, on_time: bool) -> tuple[tuple[str, ...], str]:
    """Those of the first rule that fits an optimizer and a first stage, by name, and why."""
    rule = next(
        rule
        for rule in load_findings()["corrections"]
        if optimizer in rule["optimizers"]
        and lag <= rule.get("most_lag", inf)
        and (on_time or not rule.get("on_time"))
    )
    return tuple(rule["take"]), sentence(rule["reason"], lag=lag)
