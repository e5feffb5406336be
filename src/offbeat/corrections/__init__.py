"""Corrections: what makes staleness less harmful. Joining ``CORRECTIONS`` is what adds one."""

from typing import Any

from offbeat.corrections.base import Correction as Correction
from offbeat.corrections.base import Hook as Hook
from offbeat.corrections.base import Moment as Moment
from offbeat.corrections.base import Surroundings as Surroundings
from offbeat.corrections.clip import ClipPerStage as ClipPerStage
from offbeat.corrections.delay_compensation import DelayCompensation as DelayCompensation
from offbeat.corrections.extrapolate import Extrapolate as Extrapolate
from offbeat.corrections.gap_aware import GapAware as GapAware
from offbeat.corrections.look_ahead import LookAhead as LookAhead
from offbeat.corrections.momentum_by_lag import MomentumByLag as MomentumByLag
from offbeat.corrections.predict import Predict as Predict
from offbeat.corrections.rate_by_lag import RateByLag as RateByLag
from offbeat.corrections.rewind import Rewind as Rewind
from offbeat.corrections.shrink import Shrink as Shrink
from offbeat.corrections.spike_compensation import SpikeCompensation as SpikeCompensation
from offbeat.monitors.monitor import Monitor as Monitor
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
