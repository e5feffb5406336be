"""Measured numbers: from raw rows into one file, and from there onto every page."""

from __future__ import annotations

import doctest
import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks import facts, intervals, pages, stored
from benchmarks.accuracy import summary
from benchmarks.intervals import Interval, mean, ratio, unpaired_ratio, verdict
from benchmarks.pages import Unknown, unmarked, with_facts

ROOT = Path(__file__).parent.parent
FACTS: dict[str, pages.Fact] = {"a.speed": [1.987, 0.9, 2.41], "a.gap": -0.04, "a.rows": 1234.4}


# ------------------------------------------------------------------ what stands on the pages


@pytest.fixture(scope="module")
def rewritten() -> dict[Path, tuple[str, str]]:
    stored_facts = json.loads(facts.FILE.read_text())
    return {page: (before, after) for page, before, after in facts.rewritten(stored_facts)}


@pytest.mark.parametrize("page", pages.pages(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_what_was_measured(page: Path, rewritten: dict[Path, tuple[str, str]]) -> None:
    before, after = rewritten[page]
    assert before == after, "run: python -m benchmarks.facts"


def test_the_file_of_facts_is_what_the_raw_rows_say() -> None:
    stored_facts, found = json.loads(facts.FILE.read_text()), facts.measured()
    assert stored_facts.keys() == facts.shown(), "run: python -m benchmarks.facts"
    for name, value in stored_facts.items():
        assert value == pytest.approx(found[name], rel=1e-4), name


SHOWN = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", sorted(SHOWN), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_number_of_a_page_is_without_its_measurement(page: Path) -> None:
    found = list(unmarked(page.read_text()))
    assert not found, f"mark these numbers as pages.py says, or leave them out: {found}"


def test_the_page_of_all_claims_has_every_benchmark() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for page in sorted((ROOT / "benchmarks").glob("*/README.md")):
        assert f"({page.parent.name}/README.md)" in text


# ------------------------------------------------------------------ marks


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1.9<!--a.speed--> times", "2.0<!--a.speed--> times"),
        ("**1.90** times<!--a.speed-->", "**1.99** times<!--a.speed-->"),
        ("1.9 (1 to 2.00)<!--a.speed:interval-->", "2.0 (1 to 2.41)<!--a.speed:interval-->"),
        ("3 of 4, 0.0 to 9.99<!--a.speed:range-->", "3 of 4, 0.9 to 2.41<!--a.speed:range-->"),
        ("it is ahead<!--a.speed:verdict--> of", "it is level<!--a.speed:verdict--> of"),
        ("+1.00<!--a.gap--> and 1.000<!--a.gap-->", "-0.04<!--a.gap--> and -0.040<!--a.gap-->"),
        ("+1.0<!--a.gap-->", "0.0<!--a.gap-->"),
        ("1.00<!--a.gap:negative-->", "0.04<!--a.gap:negative-->"),
        ("1,000<!--a.rows--> and 9<!--a.rows-->", "1,234<!--a.rows--> and 1234<!--a.rows-->"),
    ],
)  # fmt: skip
def test_a_mark_makes_the_numbers_before_it_the_measured_ones(before: str, after: str) -> None:
    assert with_facts(before, FACTS, {}) == after
    assert with_facts(after, FACTS, {}) == after


def test_a_table_is_put_between_its_comments() -> None:
    page = "a\n<!--table x.y-->\n| old |\n<!--end-->\n1<!--a.gap-->"
    found = with_facts(page, FACTS, {"x.y": "| 7 |\n| 8 |"})
    assert found == "a\n<!--table x.y-->\n| 7 |\n| 8 |\n<!--end-->\n0<!--a.gap-->"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("1.0<!--a.spead-->", "no fact is named a.spead"),
        ("1.0 (1 to 2)<!--a.gap:interval-->", "a.gap has no interval"),
        ("so fast<!--a.speed-->", "needs 1 numbers"),
        ("2.0<!--a.speed--> (1.0 to 2)<!--a.speed:interval-->", "needs 3 numbers"),
        ("1.0 and\n\nthen<!--a.speed-->", "needs 1 numbers"),
        ("<!--table x-->\n<!--end-->", "no table is named x"),
    ],
)
def test_a_mark_without_a_measurement_is_refused(page: str, words: str) -> None:
    with pytest.raises(Unknown, match=words):
        with_facts(page, FACTS, {})


def test_a_measured_number_without_a_mark_is_found() -> None:
    text = (
        "Of 4 stages, 1.5 (0.9 to 2.4)<!--a.speed:interval--> with `lr=0.1`, 37 % and +0.25 points,"
        " torch 2.13, arXiv 1912.12675\n```\n1.23\n```\n<!--not measured-->\n\n4.56\n<!--end-->\n"
        "7.5, 9.9 %<!--not measured--> and 8.5<!--a.gap-->"
    )
    assert list(unmarked(text)) == ["37", "+0.25", "7.5"]


# ------------------------------------------------------------------ intervals


def test_a_ratio_of_rounds_is_not_moved_by_a_round_that_is_slow_for_both() -> None:
    ours, theirs = [1.0, 1.1, 3.0, 1.0], [2.0, 2.2, 6.0, 2.1]
    paired, apart = ratio(theirs, ours), unpaired_ratio(theirs, ours)
    assert paired.centre == pytest.approx(apart.centre)
    assert paired.high - paired.low < 0.2 < apart.high - apart.low
    assert verdict(paired.values) == "ahead"
    assert verdict(apart.values) == "level"
    assert verdict(ratio(ours, theirs).values) == "behind"


def test_an_interval_is_student_s() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert found.values == pytest.approx([2, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)])
    assert mean([5.0]).low == -math.inf
    assert f"{Interval(1, 0.5, 2):.1f}" == "1.0 (0.5 to 2.0)"


@pytest.mark.parametrize("module", [intervals, pages, summary], ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 == result.failed


# ------------------------------------------------------------------ rows


NESTED: dict[str, Any] = {
    "one": {
        "setting": {"a": [1, 2]},
        "waves": [{"rounds": [{"x": {"s": 1.5}, "y": {"s": 2}}, {}]}],
    },
    "two": {"setting": None, "waves": [], "at": 3, "rows": [{"is": 1}, {"at": []}, 4, [5]]},
    "three": [],
}


@pytest.mark.parametrize("rows", [(), ("*.waves.*.rounds.*.*",), ("*.waves.*", "two.rows.*")])
def test_a_stored_result_comes_back_as_it_was(rows: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    stored.write_result(path, NESTED, *rows)
    assert stored.read_result(path) == NESTED
    assert list(stored.read_result(path)) == list(NESTED)
    again = tmp_path / "again.jsonl"
    stored.write_result(again, stored.read_result(path), *rows)
    assert again.read_text() == path.read_text()


def test_a_row_is_a_line_that_says_where_it_belongs(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    stored.write_result(path, {"setting": {"rounds": 2}, "turns": [{"s": 1}, {"s": 2}]}, "turns.*")
    assert path.read_text().splitlines() == [
        '{"at": ["setting"], "rounds": 2}',
        '{"at": ["turns", 0], "s": 1}',
        '{"at": ["turns", 1], "s": 2}',
    ]


def test_stored_results_have_a_row_a_line() -> None:
    for path in (ROOT / "benchmarks").rglob("*.json*"):
        lines = path.read_text().splitlines()
        assert len(lines) < 1000 or path.suffix == ".jsonl", path
        assert path.suffix == ".json" or all(map(json.loads, lines)), path


def test_a_page_names_stored_results_that_exist() -> None:
    """But for those that a command is to write."""
    for page in pages.pages(ROOT):
        for name in re.findall(r"(?<!--out )(benchmarks/[\w/.-]+\.jsonl?)\b", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
