"""How replicas of a model are kept together. Joining ``AVERAGINGS`` is what adds one."""

from typing import Any

from offbeat.averaging.all_reduce import AllReduce as AllReduce
from offbeat.averaging.base import Averaging as Averaging
from offbeat.averaging.co2 import CO2 as CO2
from offbeat.averaging.cocod import CoCoD as CoCoD
from offbeat.averaging.d_psgd import DPSGD as DPSGD
from offbeat.averaging.dasgd import DaSGD as DaSGD
from offbeat.averaging.diloco import DiLoCo as DiLoCo
from offbeat.averaging.eager_diloco import EagerDiLoCo as EagerDiLoCo
from offbeat.averaging.hierarchical_sgd import HierarchicalSGD as HierarchicalSGD
from offbeat.averaging.local_sgd import LocalSGD as LocalSGD
from offbeat.averaging.noloco import NoLoCo as NoLoCo
from offbeat.averaging.overlap_local_sgd import OverlapLocalSGD as OverlapLocalSGD
from offbeat.averaging.post_local_sgd import PostLocalSGD as PostLocalSGD
from offbeat.averaging.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
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
    HierarchicalSGD,
    DPSGD,
    NoLoCo,
)


def averaging_named(name: str, **settings: Any) -> Averaging:
    """The averaging of this name, case ignored: ``averaging_named("dasgd", every=4, delay=1)``."""
    return choose("averaging", AVERAGINGS, name, settings)
