"""Corrections: what makes staleness less harmful. Joining ``CORRECTIONS`` is what adds one."""

from typing import Any

from offbeat.corrections.base import Correction, Hook, Moment, Surroundings
from offbeat.corrections.clip import ClipPerStage
from offbeat.corrections.delay_compensation import DelayCompensation
from offbeat.corrections.extrapolate import Extrapolate
from offbeat.corrections.gap_aware import GapAware
from offbeat.corrections.look_ahead import LookAhead
from offbeat.corrections.momentum_by_lag import MomentumByLag
from offbeat.corrections.predict import Predict
from offbeat.corrections.rate_by_lag import RateByLag
from offbeat.corrections.rewind import Rewind
from offbeat.corrections.shrink import Shrink
from offbeat.corrections.spike_compensation import SpikeCompensation
from offbeat.monitors.monitor import Monitor
from offbeat.registry import choose

CORRECTIONS: tuple[type[Correction], ...] = (
    Predict,
    SpikeCompensation,
    LookAhead,
    Extrapolate,
    Shrink,
    DelayCompensation,
    GapAware,
    ClipPerStage,
    RateByLag,
    MomentumByLag,
    Rewind,
)


def correction_named(name: str, **settings: Any) -> Correction:
    """The correction of this name, case ignored.

    >>> correction_named("predict", horizon="lag")
    Predict(direction='optimizer', horizon='lag')
    """
    return choose("correction", CORRECTIONS, name, settings)


__all__ = [
    "CORRECTIONS",
    "ClipPerStage",
    "Correction",
    "DelayCompensation",
    "Extrapolate",
    "GapAware",
    "Hook",
    "LookAhead",
    "Moment",
    "MomentumByLag",
    "Monitor",
    "Predict",
    "RateByLag",
    "Rewind",
    "Shrink",
    "SpikeCompensation",
    "Surroundings",
    "correction_named",
]
