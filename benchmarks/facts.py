"""Every measured number, from raw rows, in one file; and every page that shows one.

    python -m benchmarks.facts

writes the marked numbers and the tables of all pages, and into facts.json the numbers they show.
`pages.py` says how a page is marked. Every folder named here has a `summary.py` with `facts()` and,
for tables, `tables()`.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.intervals import Interval
from benchmarks.pages import MARK, Fact, Unknown, pages, with_facts

from offbeat.methods.auto import load_findings

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_suffix(".json")
FOLDERS = (
    "accuracy",
    "averaging",
    "checks",
    "claims",
    "demo",
    "faults",
    "language",
    "memory",
    "networks",
    "one_gpu",
    "programs",
    "progress",
    "shared_gpu",
    "simulator",
    "slow_link",
    "stability",
    "stragglers",
    "two_cores",
)


def measured() -> dict[str, Fact]:
    """Name by name: a number, or one with its interval, in the units in which pages show it."""
    found: dict[str, Fact] = {}
    for folder in FOLDERS:
        for name, value in summary_of(folder).facts():
            assert f"{folder}.{name}" not in found, f"{folder}.{name} is measured twice"
            found[f"{folder}.{name}"] = rounded(value)
    return found


def rounded(value: float | Interval) -> Fact:
    """To six digits, in which machines agree."""
    if isinstance(value, Interval):
        return [float(f"{number:.6g}") for number in value.values]
    return float(f"{value:.6g}")


def tables() -> dict[str, str]:
    return {
        f"{folder}.{name}": table
        for folder in FOLDERS
        if hasattr(summary_of(folder), "tables")
        for name, table in summary_of(folder).tables().items()
    }


def summary_of(folder: str) -> ModuleType:
    return import_module(f"benchmarks.{folder}.summary")


def rewritten(facts: dict[str, Fact]) -> Iterator[tuple[Path, str, str]]:
    """Every page, as it stands and as it was measured."""
    made = tables()
    for page in pages(ROOT):
        text = page.read_text()
        try:
            yield page, text, with_facts(text, facts, made)
        except Unknown as error:
            raise Unknown(f"{page.relative_to(ROOT)}: {error}") from None


def shown() -> set[str]:
    """The names of all facts that stand on a page, or behind what `auto` chooses."""
    named = {name for page in pages(ROOT) for name, _ in MARK.findall(page.read_text())}
    findings = load_findings()["findings"].values()
    return named | {name for finding in findings for name in finding["facts"].values()}


def main() -> None:
    facts = measured()
    for page, before, after in rewritten(facts):
        if before != after:
            page.write_text(after)
            print(f"rewritten: {page.relative_to(ROOT)}")
    used = shown()
    lines = (f"{json.dumps(name)}: {json.dumps(facts[name])}" for name in facts if name in used)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
