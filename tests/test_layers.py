"""The shape of the package: who may import whom, what is exported, what works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat

PACKAGE = Path(offbeat.__file__).parent

# A folder may import its own layer and those below. Every folder is in exactly one layer.
LAYERS: list[set[str]] = [
    {"errors", "registry", "schedules", "methods", "records"},
    {"nest", "rng", "faults"},
    {"corrections", "monitors"},
    {"stages", "optimizers"},
    {"cutting", "guards"},
    {"transport", "averaging", "elastic", "engines", "checkpoints", "trainer"},
    {"zoo", "app", "__main__"},
]
TORCH_FREE = 0
DISTRIBUTED = 5
"""The first layer that may know torch.distributed."""


def layer_of(module: str) -> int:
    name = module.removeprefix("offbeat.").split(".")[0]
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert len(found) == 1, f"{name} is in {len(found)} layers: put it into one of LAYERS"
    return found[0]


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: write imports in full"
            if node.module == "offbeat":
                found |= {f"offbeat.{a.name}" for a in node.names if a.name != "__version__"}
            else:
                found.add(node.module)
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    own = layer_of(path.relative_to(PACKAGE).with_suffix("").parts[0])
    for module in imports_of(path):
        if module.startswith("offbeat."):
            assert layer_of(module) <= own, f"{path.name} (layer {own}) imports {module}"
        if own == TORCH_FREE:
            assert module.split(".")[0] in {*sys.stdlib_module_names, "offbeat"}
        if own < DISTRIBUTED and module != "torch.distributed.pipelining":  # a splitter, no network
            assert not module.startswith("torch.distributed"), f"{path.name} imports {module}"


def test_layer_zero_answers_without_torch() -> None:
    script = (
        "import sys, offbeat.schedules.timeline, offbeat.methods.auto\n"
        "import offbeat.records.ledger, offbeat.cutting.balance\n"
        "offbeat.StaleWeights().schedule(4).table(3).grid()\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_listing_is_the_architecture() -> None:
    """Whoever adds an entry here asks first whether two others belong together."""
    entries = {p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"}
    assert len(entries - {"__init__.py", "__main__.py", "py.typed"}) <= 22, sorted(entries)


def test_exported_names() -> None:
    """Adding a name here is a promise to keep it."""
    assert offbeat.__all__ == [
        "ADL",
        "Auto",
        "DDG",
        "DGL",
        "DSP",
        "Evaluation",
        "FDG",
        "Faults",
        "FeaturesReplay",
        "GPipe",
        "Guards",
        "Ledger",
        "OffbeatError",
        "OneFOneB",
        "Phases",
        "PipeDream",
        "PipeDream2BW",
        "Schedule",
        "StaleWeights",
        "Synchronous",
        "Table",
        "Trainer",
        "__version__",
        "launch",
        "seed_for",
    ]
    assert {*offbeat.__all__, "corrections", "methods"} <= set(dir(offbeat))  # for the tab key
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        _ = offbeat.Trianer  # type: ignore[attr-defined]
