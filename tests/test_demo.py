"""The demo, run as a user runs it but for one epoch."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.methods import ADL, DSP, Method, PipeDream, StaleWeights, Synchronous

DEMO = Path(__file__).parents[1] / "examples" / "digits.py"
SEEDS = Path(__file__).parents[1] / "benchmarks" / "demo"
NAMES = ["BP", "StaleWeights", "hybrid", "DSP", "ADL", "PipeDream"]
LAGS: dict[str, Method] = {
    "BP": Synchronous(),
    "StaleWeights": StaleWeights(),
    "hybrid": StaleWeights(),
    "DSP": DSP(),
    "ADL": ADL(accumulate=4),
    "PipeDream": PipeDream(),
}


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, Any]]:
    """The demo's names, on one thread: on busy cores, as under ``pytest -n 2``, two threads wait
    for each other at every small operation and the demo was seen to take thirty times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield runpy.run_path(str(DEMO))
    torch.set_num_threads(threads)


@pytest.mark.timeout(60)
def test_the_demo_writes_its_files_and_names_all_methods(
    demo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deep" / "er"
    demo["main"](["--epochs", "1", "--out", str(folder)])
    printed = capsys.readouterr().out

    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert rows == NAMES
    assert "Notice: " in printed
    for name in ("runs.json", "curves.png", "timelines.png"):
        assert str(folder / name) in printed
    for name in ("curves.png", "timelines.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")

    stored = json.loads((folder / "runs.json").read_text())
    assert stored["settings"]["updates"] == 23
    runs = {run["name"]: run for run in stored["runs"]}
    for name, method in LAGS.items():
        assert tuple(runs[name]["lags"]) == method.lags(4), name
        assert [epoch for epoch, _ in runs[name]["accuracy"]] == [1]
    assert runs["PipeDream"]["weight_copies"] == [4, 3, 2, 1]
    assert runs["StaleWeights"]["weight_copies"] == runs["DSP"]["weight_copies"] == [1, 1, 1, 1]
    speed_ups = [runs[name]["ideal_speed_up"] for name in NAMES]
    assert speed_ups == pytest.approx([1, 4, 1 / (11 / 23 / 4 + 12 / 23), 3, 4, 4], abs=1e-4)


@pytest.mark.timeout(60)
def test_the_same_seed_gives_the_same_run(demo: dict[str, Any]) -> None:
    data = demo["digits"](5)
    once, again = (
        demo["train"]("PipeDream", PipeDream(), data, 1, 5, lambda: None) for _ in range(2)
    )
    assert once == again
    assert once.accuracy[-1][1] > 0.2  # ten classes: it has begun to learn


def test_the_notice_says_what_the_numbers_show(demo: dict[str, Any]) -> None:
    def run(name: str, copies: int, *accuracy: float) -> Any:
        return demo["Run"](
            name=name,
            method=name,
            lags=[0],
            weight_copies=[copies],
            accuracy=list(enumerate(accuracy, start=1)),
            ideal_speed_up=1.0,
        )

    runs = [run("BP", 1, 0.96, 0.98), run("late", 1, 0.5, 0.95), run("never", 3, 0.5, 0.9)]
    words = demo["notice"](runs, 200)
    assert "epochs to 95%: BP 1, late 2, never not yet." in words
    assert "Farthest from BP at the end: never, -8.0 points" in words
    assert "one test image is 0.50" in words
    assert "Most weight copies: never, 3." in words


def test_zero_epochs_are_refused(demo: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo["main"](["--epochs", "0"])
    assert "--epochs 0: give at least 1" in capsys.readouterr().err


def test_the_curves_tell_the_methods_apart_at_the_end(demo: dict[str, Any]) -> None:
    """As accuracies on a linear axis six lines lay on one another in the last three epochs."""
    stored = json.loads((SEEDS / "seed-0.json").read_text())["runs"]
    figure = demo["draw_errors"](stored, 359)
    (axes,) = figure.axes
    low, high = (axes.transData.transform((0, y))[1] for y in axes.get_ylim())
    ends = {
        round((axes.transData.transform(line.get_xydata()[-1])[1] - low) / (high - low), 2)
        for line in axes.lines
    }
    assert max(ends) - min(ends) > 0.2
    assert len({run["accuracy"][-1][1] for run in stored}) == len(ends)


def test_no_error_stands_at_half_an_image(demo: dict[str, Any]) -> None:
    (axes,) = demo["draw_errors"]([{"name": "BP", "accuracy": [[1, 0.5], [2, 1.0]]}], 200).axes
    assert axes.lines[0].get_ydata().tolist() == [50.0, 0.25]
    assert axes.get_yscale() == "log"
