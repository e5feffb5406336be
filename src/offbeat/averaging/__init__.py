"""How replicas of a model are kept together. Joining ``AVERAGINGS`` is what adds one."""

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
from offbeat.registry import choose

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
    return choose("averaging", AVERAGINGS, name, settings)


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
