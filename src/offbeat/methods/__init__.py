"""Every method, by class and by name. Joining ``METHODS`` is what adds one to the library."""

from typing import Any

from offbeat.errors import ConfigurationError
from offbeat.methods.adl import ADL as ADL
from offbeat.methods.base import RULES as RULES
from offbeat.methods.base import Asynchronous as Asynchronous
from offbeat.methods.base import Method as Method
from offbeat.methods.base import Rule as Rule
from offbeat.methods.ddg import DDG as DDG
from offbeat.methods.dgl import DGL as DGL
from offbeat.methods.dsp import DSP as DSP
from offbeat.methods.fdg import FDG as FDG
from offbeat.methods.features_replay import FeaturesReplay as FeaturesReplay
from offbeat.methods.gpipe import GPipe as GPipe
from offbeat.methods.one_f_one_b import OneFOneB as OneFOneB
from offbeat.methods.phases import Phases as Phases
from offbeat.methods.pipedream import PipeDream as PipeDream
from offbeat.methods.pipedream_2bw import PipeDream2BW as PipeDream2BW
from offbeat.methods.stale_weights import StaleWeights as StaleWeights
from offbeat.methods.synchronous import Synchronous as Synchronous
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
