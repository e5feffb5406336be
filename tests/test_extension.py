"""Every page "Add a ..." followed to the letter in a copy of this tree, where the new parts then
pass the tests that they join."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

import test_docs
from test_docs import ADD, CHOOSE, README, ROOT, blocks, by_name, changed_by, two_sides

PAGES = sorted((ROOT / "docs").glob("add-*.md"))
LISTS = (
    "table_of or has_an_oracle or has_a_row or names_every or every_way or in_the_lists"
    " or (session and corrections)"
)
"""Tests that look at a whole list: what has joined it is in the tables and has an oracle."""
UNNAMED = {
    ("add-a-method", "test_processes"): "test_many_processes_give_the_bits_of_one",
    ("add-an-averaging", "test_replicas"): "test_processes_give_the_bits_of_one",
    ("add-an-averaging", "test_fuzz"): "test_any_trainer_trains_or_says_why_not",
    ("add-a-cut", "test_models"): "test_in_processes_and_with_replicas",
}
"""Of a page and a file: the test that takes all parts of a list at once."""


# ------------------------------------------------------------------ following a page


def new_file(page: Path) -> Path:
    """Where the first step of a page writes its part."""
    (path, *_) = re.findall(r"^`(src/offbeat/\w+/\w+\.py)`", page.read_text(), re.MULTILINE)
    return Path(path)


def follow(page: Path, tree: Path) -> None:
    """Writes the file, appends what goes into a file, and applies the diffs."""
    part, *others = blocks(page, "python")
    (tree / new_file(page)).write_text(part.text)
    for block in others:
        before = page.read_text().splitlines()[: block.line - 2]
        goes = re.search(r"goes into \[[^]]*\]\(\.\./([\w/.]+)\)", "\n".join(before[-4:]))
        if goes is not None:
            there = "".join(line for line in block.text.splitlines(True) if "already" not in line)
            with (tree / goes[1]).open("a") as oracles:
                oracles.write(there)
    for diff in blocks(page, "diff"):
        file, (old, new) = changed_by(diff, tree), two_sides(diff)
        text = file.read_text()
        assert text.count(old) == 1, f"{diff} does not fit {file}"
        file.write_text(text.replace(old, new))


def write_and_paste() -> None:
    """In a process of the copy: the golden file, and what the tests say is to be pasted."""
    part, *others = blocks(ADD, "python")
    namespace: dict[str, object] = {"__name__": "unstashed"}
    for block in (part, *(block for block in others if "write_text" in block.text)):
        test_docs.run(block, namespace)
    checks: dict[Path, Callable[[], None]] = {
        README: test_docs.test_the_table_of_methods_is_the_registry,
        CHOOSE: test_docs.test_the_table_of_costs_is_read_off_the_schedules,
    }
    for page, check in checks.items():
        with pytest.raises(AssertionError, match="paste this") as caught:
            check()
        table = str(caught.value).partition("\n")[2]
        old = test_docs.table_after(page, table.partition("\n")[0])
        page.write_text(page.read_text().replace(old, table))
    for session in test_docs.SESSIONS:
        if session.command == "offbeat corrections":
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                test_docs.carry_out(session)
            text = session.page.read_text()
            session.page.write_text(text.replace(session.printed, shown.getvalue()))


# ------------------------------------------------------------------ in a copy


@dataclass(frozen=True)
class Outcome:
    """Of one test of the copy."""

    file: str
    test: str
    passed: bool
    words: str


def in_copy(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(tree / folder) for folder in ("src", "tests", "."))
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST")}
    environment = {**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, timeout=500, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


def joined_files(page: Path) -> set[str]:
    """The test files that a page names in its table of checks."""
    return set(re.findall(r"\| .*`tests/(\w+)\.py`", page.read_text()))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Of all tests that the pages' parts join, side by side in one copy."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("src", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (f for f in ROOT.iterdir() if f.suffix in (".md", ".toml")):
        shutil.copy(file, tree)
    for page in PAGES:
        follow(page, tree)
    pasted = in_copy(tree, "-c", "import test_extension as t; t.write_and_paste()")
    assert pasted.returncode == 0, pasted.stderr
    parts = " or ".join(new_file(page).stem for page in PAGES)
    files = {"test_docs", *(file for page in PAGES for file in joined_files(page))}
    done = in_copy(
        tree, "-m", "pytest", *(f"tests/{file}.py" for file in sorted(files)),
        "-k", f"{parts} or {LISTS} or {' or '.join(UNNAMED.values())}",
        "-p", "no:cacheprovider", "-n", "2", "--junitxml", "outcomes.xml",
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [
        Outcome(
            file=case.attrib["classname"].split(".")[-1],
            test=case.attrib["name"],
            passed=case.find("failure") is case.find("error") is None,
            words="".join(case.itertext()),
        )
        for case in ElementTree.parse(tree / "outcomes.xml").iter("testcase")
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_part_that_follows_its_page_passes_the_tests_of_the_page(
    page: Path, outcomes: list[Outcome]
) -> None:
    """In each file that the page promises there is a test of the part, and all of them pass."""
    part = new_file(page).stem
    assert joined_files(page)
    for file in joined_files(page):
        names = part, UNNAMED.get((page.stem, file), part)
        seen = [o for o in outcomes if o.file == file and any(n in o.test.lower() for n in names)]
        assert seen, f"{page.name} promises a test of {part} in {file}.py"
        failed = [o for o in seen if not o.passed]
        assert not failed, f"{failed[0].file}: {failed[0].test}\n{failed[0].words}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_lists_and_tables_of_the_copy_are_complete(outcomes: list[Outcome]) -> None:
    failed = [o for o in outcomes if not o.passed]
    assert not failed, f"{failed[0].file}: {failed[0].test}\n{failed[0].words}"
    assert len(outcomes) > 60
