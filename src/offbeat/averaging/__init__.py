"""How replicas of a model are kept together. Joining ``AVERAGINGS`` is what adds one."""

from dataclasses import MISSING, fields
from typing import Any

from offbeat.averaging.all_reduce import AllReduce
from offbeat.averaging.base import Averaging
from offbeat.averaging.co2 import CO2
from offbeat.averaging.cocod import CoCoD
from offbeat.averaging.dasgd import DaSGD
from offbeat.averaging.diloco import DiLoCo
from offbeat.averaging.eager_diloco import EagerDiLoCo
from offbeat.averaging.local_sgd import LocalSGD
from offbeat.averaging.overlap_local_sgd import OverlapLocalSGD
from offbeat.averaging.post_local_sgd import PostLocalSGD
from offbeat.averaging.streaming_diloco import StreamingDiLoCo
from offbeat.errors import ConfigurationError, unknown

AVERAGINGS: tuple[type[Averaging], ...] = (
    AllReduce,
    LocalSGD,
    PostLocalSGD,
    DaSGD,
    CoCoD,
    OverlapLocalSGD,
    DiLoCo,
    StreamingDiLoCo,
    EagerDiLoCo,
    CO2,
)


def averaging_named(name: str, **settings: Any) -> Averaging:
    """The averaging of this name, case ignored: ``averaging_named("dasgd", every=4, delay=1)``."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    for averaging in AVERAGINGS:
        if wanted in (averaging.name, averaging.__name__.lower()):
            return _with(averaging, settings)
    raise unknown("averaging", name, [averaging.name for averaging in AVERAGINGS])


def _with(averaging: type[Averaging], settings: dict[str, Any]) -> Averaging:
    known = [field.name for field in fields(averaging)]
    for setting in settings:
        if setting not in known:
            raise ConfigurationError(
                f"{averaging.name} has no setting {setting!r}: it takes {', '.join(known)}."
            )
    needed = [f.name for f in fields(averaging) if f.default is MISSING]
    missing = [name for name in needed if name not in settings]
    if missing:
        example = ", ".join(f"{name}=..." for name in needed)
        raise ConfigurationError(
            f"{averaging.name} needs {' and '.join(missing)}: give {averaging.__name__}({example})."
        )
    return averaging(**settings)


__all__ = [
    "AVERAGINGS",
    "CO2",
    "AllReduce",
    "Averaging",
    "CoCoD",
    "DaSGD",
    "DiLoCo",
    "EagerDiLoCo",
    "LocalSGD",
    "OverlapLocalSGD",
    "PostLocalSGD",
    "StreamingDiLoCo",
    "averaging_named",
]
