"""offbeat: asynchronous training for PyTorch, exact to the weight version.

Names are loaded when first used, so that ``offbeat.methods``, schedules and timelines answer
without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_METHODS = (
    "ADL", "DDG", "DGL", "DSP", "FDG", "FeaturesReplay", "GPipe", "OneFOneB", "Phases", "PipeDream",
    "PipeDream2BW", "StaleWeights", "Synchronous",
)  # fmt: skip
_HOME = {
    "Trainer": "trainer",
    "Auto": "methods.auto",
    "Evaluation": "engines.evaluation",
    "Ledger": "records.ledger",
    "Faults": "faults",
    "Guards": "guards",
    "Machines": "engines.machines",
    "launch": "engines.launcher",
    "Schedule": "schedules.schedule",
    "Table": "schedules.table",
    "seed_for": "rng",
    "untie": "cutting.sharing",
    "OffbeatError": "errors",
    **dict.fromkeys(_METHODS, "methods"),
}

_MODULES = ("averaging", "corrections", "errors", "faults", "guards", "methods", "zoo")
"""Modules that ``import offbeat`` is enough for."""

if TYPE_CHECKING:
    from offbeat.cutting.sharing import untie as untie
    from offbeat.engines.evaluation import Evaluation as Evaluation
    from offbeat.engines.launcher import launch as launch
    from offbeat.engines.machines import Machines as Machines
    from offbeat.errors import OffbeatError as OffbeatError
    from offbeat.faults import Faults as Faults
    from offbeat.guards import Guards as Guards
    from offbeat.methods import ADL as ADL
    from offbeat.methods import DDG as DDG
    from offbeat.methods import DGL as DGL
    from offbeat.methods import DSP as DSP
    from offbeat.methods import FDG as FDG
    from offbeat.methods import FeaturesReplay as FeaturesReplay
    from offbeat.methods import GPipe as GPipe
    from offbeat.methods import OneFOneB as OneFOneB
    from offbeat.methods import Phases as Phases
    from offbeat.methods import PipeDream as PipeDream
    from offbeat.methods import PipeDream2BW as PipeDream2BW
    from offbeat.methods import StaleWeights as StaleWeights
    from offbeat.methods import Synchronous as Synchronous
    from offbeat.methods.auto import Auto as Auto
    from offbeat.records.ledger import Ledger as Ledger
    from offbeat.rng import seed_for as seed_for
    from offbeat.schedules.schedule import Schedule as Schedule
    from offbeat.schedules.table import Table as Table
    from offbeat.trainer import Trainer as Trainer

__all__ = sorted([*_HOME, "__version__"])


if not TYPE_CHECKING:  # a type checker reads the imports above, and so still finds misspelt names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"offbeat.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
        return getattr(import_module(f"offbeat.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted([*__all__, *_MODULES])
