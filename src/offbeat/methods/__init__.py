"""Every method, by class and by name. Joining ``METHODS`` is what adds one to the library."""

from typing import Any

from offbeat.errors import ConfigurationError
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
from offbeat.registry import choose

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
    """The method of this name, case ignored: ``method_named("adl", accumulate=2)``.

    >>> method_named("pipedreem")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    offbeat.errors.ConfigurationError: unknown method 'pipedreem'. Did you mean 'pip...auto.
    """
    if name.strip().lower() == "auto":
        raise ConfigurationError(
            f"method {name!r} stands for one that is chosen for a model, its optimizer and batch by"
            " Trainer(method='auto') or 'offbeat train --method auto', which say what they choose."
            " Give that one here, by its name."
        )
    return choose("method", METHODS, name, settings, also=["auto"])


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
