"""Which run is compared with which, and what is said where a comparison is not fair."""

import re
from pathlib import Path
from typing import Any

from offbeat.app.report import page
from offbeat.app.runs import SUMMARY, Run
from stored_runs import Seen, changed, made_run


def compared(*runs: Run) -> tuple[dict[str, str], str]:
    """Per run the cell that says its gap, and all words of the page."""
    text = page(runs)
    (side,) = re.findall(r'<table class="side">.*?</table>', text)
    heads = re.findall(r'<th scope="col">(.*?)</th>', side)
    (column,) = (place for place, head in enumerate(heads) if head.startswith("gap, "))
    lines = re.findall(r'<th scope="row">.*?</svg> (.*?)</th>(.*?)</tr>', side)
    gaps = {name: re.findall(r"<td>(.*?)</td>", cells)[column - 1] for name, cells in lines}
    return gaps, Seen(text).words


def seeded(
    folder: Path, method: str, seed: int, accuracy: float, name: str = "", **config: Any
) -> Run:
    settings = {"seed": seed, "data": {"name": "digits", "settings": {}}} | config
    folder = folder / (name or f"{method}-{seed}")
    return made_run(folder, method, accuracy=accuracy, config=settings)


def test_runs_are_compared_with_the_synchronous_one(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "stale", accuracy=0.9),
        made_run(tmp_path / "bp", "synchronous", accuracy=0.925),
    ]
    gaps, words = compared(*runs)
    assert gaps == {"stale": "-2.5 to bp", "bp": "baseline"}
    assert "gap, points" in words
    assert "30 ms" in words and "256" in words


def test_runs_without_an_accuracy_are_compared_by_loss(tmp_path: Path) -> None:
    plain = made_run(tmp_path / "bp", "synchronous", accuracy=None)
    late = made_run(tmp_path / "late", "adl", accuracy=None, accumulate=3)
    gaps, words = compared(changed(plain, SUMMARY, loss=2.0), changed(late, SUMMARY, loss=2.125))
    assert "adl:accumulate=3" in words
    assert "gap, in loss" in words
    assert gaps == {"bp": "baseline", "late": "+0.1250 to bp"}


def test_without_a_synchronous_run_the_page_gives_no_gap(tmp_path: Path) -> None:
    gaps, words = compared(made_run(tmp_path / "a"), made_run(tmp_path / "b", "adl"))
    assert "None of the runs is synchronous" in words
    assert gaps == {"a": "-", "b": "-"}


def test_replicas_whose_averages_are_late_are_no_baseline(tmp_path: Path) -> None:
    """Once DaSGD was, because its method is synchronous, and all-reduce stood there with a gap."""
    late = made_run(tmp_path / "dasgd3", "synchronous", replicas=2, accuracy=0.9)
    together = {"averaging": {"name": "all-reduce", "settings": {}}}
    plain = made_run(
        tmp_path / "allreduce", "synchronous", replicas=2, accuracy=0.92, config=together
    )
    gaps, _ = compared(late, plain)
    assert gaps == {"dasgd3": "-2.0 to allreduce", "allreduce": "baseline"}
    by_default = made_run(
        tmp_path / "usual", "synchronous", replicas=2, accuracy=0.92, config={"averaging": None}
    )
    assert compared(late, by_default)[0] == {"dasgd3": "-2.0 to usual", "usual": "baseline"}
    _, words = compared(late, made_run(tmp_path / "stale"))
    assert "None of the runs is synchronous" in words


def test_a_run_is_compared_with_the_synchronous_one_of_its_seed(tmp_path: Path) -> None:
    plain = [seeded(tmp_path, "synchronous", s, a) for s, a in ((0, 0.9), (1, 0.95))]
    late = [seeded(tmp_path, "adl", s, a) for s, a in ((0, 0.89), (1, 0.93))]
    gaps, _ = compared(*plain, *late)
    assert gaps == {
        "synchronous-0": "baseline",
        "synchronous-1": "baseline",
        "adl-0": "-1.0 to synchronous-0",
        "adl-1": "-2.0 to synchronous-1",
    }


def test_without_a_seed_in_common_means_are_compared_and_it_is_said(tmp_path: Path) -> None:
    plain = [seeded(tmp_path, "synchronous", s, a) for s, a in ((0, 0.9), (1, 0.94))]
    late = [seeded(tmp_path, "adl", s, a) for s, a in ((2, 0.89), (3, 0.91))]
    gaps, words = compared(*plain, *late)
    assert gaps["adl-2"] == gaps["adl-3"] == "-2.0 to the mean"
    assert (
        "adl, 4 stages: not every seed has a synchronous run, so means are compared:"
        " 90.0 \N{PLUS-MINUS SIGN} 1.4 (seeds 2, 3) with 92.0 \N{PLUS-MINUS SIGN} 2.8"
        " (seeds 0, 1); part of that is chance."
    ) in words


def test_a_seed_that_only_one_method_has_is_compared_by_means(tmp_path: Path) -> None:
    plain = seeded(tmp_path, "synchronous", 0, 0.9)
    late = [seeded(tmp_path, "adl", s, a) for s, a in ((0, 0.89), (5, 0.99))]
    gaps, words = compared(plain, *late)
    assert gaps["adl-0"] == "-1.0 to synchronous-0"
    assert gaps["adl-5"] == "+4.0 to the mean"
    assert "94.0 \N{PLUS-MINUS SIGN} 7.1 (seeds 0, 5) with 90.0 (seeds 0); part" in words


def test_scores_on_different_data_have_no_gap(tmp_path: Path) -> None:
    plain = seeded(tmp_path, "synchronous", 0, 0.99)
    late = seeded(tmp_path, "adl", 0, 0.9, data={"name": "cifar10", "settings": {}})
    gaps, words = compared(plain, late)
    assert gaps == {"synchronous-0": "baseline", "adl-0": "-"}
    assert "adl-0 has no gap: no synchronous run has its data." in words
    cifar: dict[str, Any] = {"name": "cifar10", "settings": {}}
    own = seeded(tmp_path, "synchronous", 0, 0.92, "bp", data=cifar)
    gaps, _ = compared(plain, late, own)
    assert gaps["adl-0"] == "-2.0 to bp"


def test_of_several_synchronous_recipes_the_nearest_is_compared(tmp_path: Path) -> None:
    other = seeded(tmp_path, "synchronous", 0, 0.99, "other", lr=0.1, epochs=40)
    plain = seeded(tmp_path, "synchronous", 0, 0.95, lr=0.02, epochs=10)
    late = seeded(tmp_path, "adl", 0, 0.94, lr=0.02, epochs=10)
    gaps, words = compared(other, plain, late)
    assert gaps["adl-0"] == "-1.0 to synchronous-0"
    assert "differ in more than staleness" not in words
    gaps, words = compared(other, late)
    assert gaps["adl-0"] == "-5.0 to other"
    assert "adl-0 and other differ in more than staleness: lr 0.02 (0.1), epochs" in words
