"""What is compared: AllReduce, and everything that averages less often or later."""

from dataclasses import dataclass
from typing import Literal

from offbeat.averaging import (
    CO2,
    AllReduce,
    Averaging,
    CoCoD,
    DaSGD,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    StreamingDiLoCo,
)

BASELINE = "AllReduce"
SETTINGS = (
    (4, 1, 0.25),
    (4, 2, 0.25),
    (4, 4, 0.25),
    (4, 1, 0.5),
    (8, 2, 0.25),
    (8, 4, 0.25),
    (8, 8, 0.25),
)
"""DaSGD's (every, delay, keep)."""

Merge = Literal["authors", "mean-preserving"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    name: str
    averaging: Averaging
    merge: Merge | None = None
    """DaSGD: which of the two rules."""
    kept: float | None = None
    """Share of a round's updates that the mean of the replicas keeps; None behind an outer
    optimizer, which rescales them."""


def dasgd_name(every: int, delay: int, keep: float, merge: Merge) -> str:
    return f"DaSGD({every}, {delay}, {keep}{', progress=1' if merge == 'mean-preserving' else ''})"


def kept_by(every: int, delay: int, keep: float) -> float:
    """Of the updates in a round, what is left of them after the authors' merge."""
    return (every - delay + keep * delay) / every


def _dasgd(every: int, delay: int, keep: float, merge: Merge) -> Configuration:
    averaging = DaSGD(every, delay, keep, None if merge == "authors" else 1.0)
    name = dasgd_name(every, delay, keep, merge)
    kept = averaging.updates_kept / every
    return Configuration(name=name, averaging=averaging, merge=merge, kept=kept)


_overlap = OverlapLocalSGD(4)

CONFIGURATIONS: dict[str, Configuration] = {
    configuration.name: configuration
    for configuration in (
        Configuration(name=BASELINE, averaging=AllReduce(), kept=1.0),
        Configuration(name="LocalSGD(4)", averaging=LocalSGD(4), kept=1.0),
        *(_dasgd(*setting, "authors") for setting in SETTINGS),
        *(_dasgd(*setting, "mean-preserving") for setting in SETTINGS),
        Configuration(name="CoCoD(4)", averaging=CoCoD(4), kept=1.0),
        Configuration(
            name="OverlapLocalSGD(4)", averaging=_overlap, kept=kept_by(4, 4, 1 - _overlap.pull)
        ),
        Configuration(name="DiLoCo(8)", averaging=DiLoCo(8)),
        Configuration(
            name="StreamingDiLoCo(8, fragments=2, delay=2)",
            averaging=StreamingDiLoCo(8, fragments=2, delay=2),
        ),
        Configuration(name="CO2(8)", averaging=CO2(8)),
        Configuration(name="EagerDiLoCo(8)", averaging=EagerDiLoCo(8)),
    )
}
