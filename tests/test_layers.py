"""The shape of the package: who may import whom, what is exported, what works without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
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
    {"zoo", "app", "integrations", "__main__"},
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
    assert len(entries - {"__init__.py", "__main__.py", "py.typed"}) <= 24, sorted(entries)


# ------------------------------------------------------------------ sizes, and friends

MOST_LINES = 450
MOST_LINES_OF_THE_TRAINER = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_PRIVATES = 20
_BUFFERS = "torch has no public name for the dict that a forward assigns buffers to"
_VERSION = "torch has no public name for the counter of writes in place"
_SAVED = "torch has no public name for what a loss has taken its mean over"
_HOOKS = "a stand-in of an optimizer that shares its attributes must not share its hooks"
PRIVATES: dict[str, str] = {
    "averaging/moments.py: like._optimizer_step_post_hooks": _HOOKS,
    "averaging/moments.py: like._optimizer_step_pre_hooks": _HOOKS,
    "cutting/blocks.py: buffer._version": _VERSION,
    "cutting/ends.py: module._buffers": _BUFFERS,
    "engines/means.py: mean._saved_target": _SAVED,
    "engines/means.py: mean._saved_total_weight": _SAVED,
    "engines/means.py: node._saved_reduction": _SAVED,
    "stages/buffers.py: module._buffers": _BUFFERS,
    "stages/buffers.py: buffer._version": _VERSION,
    "stages/network.py: tensor._version": _VERSION,
    "stages/relay.py: tie._version": _VERSION,
    "stages/runner.py: tensor._version": _VERSION,
    "stages/versions.py: self.tensor._version": _VERSION,
    "stages/versions.py: tensor._version": _VERSION,
}
"""Accesses to private attributes of other objects, "file: expression", and why each is needed."""


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: count for name, count in lengths.items() if count > MOST_LINES}
    assert not long, f"divide these files by what they are about: {long}"
    assert lengths["trainer.py"] <= MOST_LINES_OF_THE_TRAINER, "it only has the user's verbs"


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file and its lines, decorators not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.relative_to(PACKAGE)}:{node.name}", node.end_lineno - node.lineno + 1


def test_no_function_is_long() -> None:
    most = MOST_LINES_OF_A_FUNCTION
    lengths = [pair for path in FILES for pair in functions_of(path)]
    assert len(lengths) > 1000
    long = {name: count for name, count in lengths if count > most}
    assert not long, f"more than {most} lines: {long}"


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""Public, with an underscore so that fields may have any name."""


def privates_in(text: str) -> Iterator[str]:
    """Expressions that reach for a private attribute of another object, such as ``other._x``.

    One's own are those of self, cls and super(). What comes from a foreign package is no object
    of ours: that package says what is private (torch._C has no public name).
    """
    tree = ast.parse(text)
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("offbeat"):
            foreign |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.startswith("__") or node.attr in NAMED_TUPLE:
            continue
        owner = ast.unparse(node.value)
        own = owner in {"self", "cls", "super()", "type(self)"}
        if not own and owner.split(".")[0] not in foreign:
            yield ast.unparse(node)


def test_what_counts_as_private() -> None:
    text = """
        import torch
        from offbeat.stages.stage import Stage
        self._a, cls._b, super()._c, torch._C._d, other.__dict__, row._replace
        other._e, self.stage._f, Stage._g, things[0]._h
    """
    found = list(privates_in(textwrap.dedent(text)))
    assert found == ["other._e", "self.stage._f", "Stage._g", "things[0]._h"]


def test_objects_keep_to_what_others_show() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {expression}"
        for path in FILES
        for expression in privates_in(path.read_text())
    ]
    assert len(found) <= MOST_PRIVATES, "\n".join([f"{len(found)} accesses", *sorted(found)])
    unexplained = sorted({*found} - {*PRIVATES})
    assert not unexplained, "\n".join(["make these public, or say why in PRIVATES", *unexplained])
    assert {*PRIVATES} <= {*found}, f"no longer there: {sorted({*PRIVATES} - {*found})}"
    assert all(len(reason) > 10 for reason in PRIVATES.values())


def test_layers_are_folders() -> None:
    """Every entry of the package stands in one layer, and every layer names what exists."""
    entries = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}
    entries -= {"__init__", "__pycache__"}
    listed = [name for names in LAYERS for name in names]
    assert sorted(listed) == sorted(entries)


# ------------------------------------------------------------------ names


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
        "Machines",
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
        "untie",
    ]
    assert {*offbeat.__all__, "corrections", "methods"} <= set(dir(offbeat))  # for the tab key
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        _ = offbeat.Trianer  # type: ignore[attr-defined]
