"""The README: short, complete, and nothing in it that a run does not show."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from rich.console import Console

import offbeat
from helpers import assert_same_bits
from offbeat.methods import PipeDream
from offbeat.schedules.table import Action
from offbeat.zoo import digits, digits_cnn
from test_docs import README, ROOT, blocks

DEMO = ROOT / "benchmarks" / "demo"


def test_the_readme_stays_short() -> None:
    text = README.read_text()
    assert text.count("\n") <= 150
    assert len(text.split()) <= 1_600


def test_the_readme_lists_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", README.read_text()))
    assert linked >= {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


def test_the_diff_of_the_readme_turns_a_plain_loop_into_one_with_lag() -> None:
    """Both sides run as they stand, and without lag they end with the same bits."""
    (diff,) = blocks(README, "diff")
    lines = diff.text.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] in f" {s}") for s in "-+")
    assert before.count('"pipedream"') == 0 < after.count('"pipedream"')
    plain = outcome(before)
    without_lag = outcome(after.replace('"pipedream"', '"synchronous"'))
    assert_same_bits(plain["model"].state_dict(), without_lag["weights"])
    with_lag = outcome(after)
    assert with_lag["trainer"].lags == (3, 2, 1, 0)
    weights, plain_weights = with_lag["weights"], plain["model"].state_dict()
    assert any(not torch.equal(weights[name], plain_weights[name]) for name in plain_weights)


def outcome(text: str) -> dict[str, Any]:
    """The names after some lines that are given a model and a loader."""
    torch.manual_seed(0)
    x, y, _, _ = digits()
    loader = list(zip(x.split(64), y.split(64), strict=True))[:8]
    namespace: dict[str, Any] = {
        "torch": torch, "F": torch.nn.functional, "offbeat": offbeat,
        "model": digits_cnn(), "loader": loader,
    }  # fmt: skip
    exec(compile(text, str(README), "exec", dont_inherit=True), namespace)
    return namespace


def test_the_demo_of_the_readme_is_the_stored_run_of_its_seed() -> None:
    """What ``make demo`` prints of it, in a terminal of 80 columns."""
    demo = runpy.run_path(str(ROOT / "examples" / "digits.py"))
    runs = [demo["Run"](**run) for run in json.loads((DEMO / "seed-0.json").read_text())["runs"]]
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(demo["tabulate"](runs, title=""))
        console.print(demo["notice"](runs, test_images=359), highlight=False)
    printed = "\n".join(line.rstrip() for line in captured.get().splitlines())
    (shown,) = (block.text for block in blocks(README, "text") if "make demo" in block.text)
    assert printed.strip() in shown, f"paste this into the README:\n{printed}"


def test_the_picture_is_drawn_by_its_script_and_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ROOT / "docs" / "lag.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path), "--frames", "3"])
    runpy.run_path(str(script), run_name="__main__")
    for folder, frames in ((tmp_path, 3), (ROOT / "docs", 40)):
        with Image.open(folder / "lag.gif") as picture:
            assert isinstance(picture, GifImageFile)
            assert picture.n_frames == frames
            size = picture.size
        with Image.open(folder / "lag.png") as still:
            assert (still.format, still.size) == ("PNG", size)
    assert (ROOT / "docs" / "lag.gif").stat().st_size < 300_000
    assert (ROOT / "docs" / "lag.png").stat().st_size < 150_000


def test_the_picture_shows_the_versions_and_the_lag_of_its_run() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "lag.py"))
    run = names["train"](PipeDream())
    for stage, lag in enumerate(PipeDream().lags(4)):
        forward, backward = (run.blocks[Action(stage, kind, 5)] for kind in ("F", "B"))
        assert backward.version - forward.version == run.ledger.lags(stage)[5] == lag
