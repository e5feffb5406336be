"""Corrections: what makes staleness less harmful. Joining ``CORRECTIONS`` is what adds one."""

from dataclasses import fields
from typing import Any

from offbeat.corrections.base import Correction, Hook, Moment, Surroundings
from offbeat.corrections.clip import ClipPerStage
from offbeat.corrections.delay_compensation import DelayCompensation
from offbeat.corrections.extrapolate import Extrapolate
from offbeat.corrections.gap_aware import GapAware
from offbeat.corrections.look_ahead import LookAhead
from offbeat.corrections.momentum_by_lag import MomentumByLag
from offbeat.corrections.monitor import Monitor
from offbeat.corrections.predict import Predict
from offbeat.corrections.rate_by_lag import RateByLag
from offbeat.corrections.rewind import Rewind
from offbeat.corrections.shrink import Shrink
from offbeat.corrections.spike_compensation import SpikeCompensation
from offbeat.errors import ConfigurationError, unknown

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
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    for correction in CORRECTIONS:
        if wanted in (correction.name, correction.__name__.lower()):
            return _with(correction, settings)
    raise unknown("correction", name, [correction.name for correction in CORRECTIONS])


def _with(correction: type[Correction], settings: dict[str, Any]) -> Correction:
    known = [field.name for field in fields(correction)]
    for setting in settings:
        if setting not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no settings"
            raise ConfigurationError(f"{correction.name} has no setting {setting!r}: {takes}.")
    return correction(**settings)


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
