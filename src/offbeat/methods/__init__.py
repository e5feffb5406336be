"""Every method, by class and by name. Joining ``METHODS`` is what adds one to the library."""

from dataclasses import fields
from typing import Any

from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.adl import ADL
from offbeat.methods.base import RULES, Asynchronous, Method, Rule
from offbeat.methods.ddg import DDG
from offbeat.methods.dgl import DGL
from offbeat.methods.dsp import DSP
from offbeat.methods.fdg import FDG
from offbeat.methods.features_replay import FeaturesReplay
from offbeat.methods.gpipe import GPipe
from offbeat.methods.one_f_one_b import OneFOneB
from offbeat.methods.phases import Phases
from offbeat.methods.pipedream import PipeDream
from offbeat.methods.pipedream_2bw import PipeDream2BW
from offbeat.methods.stale_weights import StaleWeights
from offbeat.methods.synchronous import Synchronous

METHODS: tuple[type[Method], ...] = (
    Synchronous,
    GPipe,
    OneFOneB,
    PipeDream,
    PipeDream2BW,
    DDG,
    FeaturesReplay,
    FDG,
    StaleWeights,
    ADL,
    DSP,
    DGL,
)


def method_named(name: str, **settings: Any) -> Method:
    """The method of this name, case ignored: ``method_named("adl", accumulate=2)``."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    for method in METHODS:
        if wanted in (method.name, method.__name__.lower()):
            return _with(method, settings)
    raise unknown("method", name, [method.name for method in METHODS])


def _with(method: type[Method], settings: dict[str, Any]) -> Method:
    known = [field.name for field in fields(method)]
    for setting in settings:
        if setting not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no settings"
            raise ConfigurationError(f"{method.name} has no setting {setting!r}: {takes}.")
    return method(**settings)


__all__ = [
    "ADL",
    "DDG",
    "DGL",
    "DSP",
    "FDG",
    "METHODS",
    "RULES",
    "Asynchronous",
    "FeaturesReplay",
    "GPipe",
    "Method",
    "OneFOneB",
    "Phases",
    "PipeDream",
    "PipeDream2BW",
    "Rule",
    "StaleWeights",
    "Synchronous",
    "method_named",
]
