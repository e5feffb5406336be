"""Trouble at random moments, in short: ``benchmarks/faults`` has the long version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drill_job import FAULTS, MORE_FAULTS, make_plans
from helpers import assert_same_bits
from offbeat.app.runs import Run
from offbeat.checkpoints import load_weights
from test_kills import children_of, environment

EPOCHS = 3
TRAIN = ["-m", "offbeat", "train", "--method", "stale-weights", "--stages", "2", "--lr", "0.02",
         "--epochs", str(EPOCHS), "--drop-last"]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((3, 1, False), id="alone", marks=pytest.mark.long),
        pytest.param((2, 1, True), id="processes"),
    ],
)
def test_a_run_that_is_disturbed_anywhere_ends_with_the_same_bits(
    tmp_path: Path, layout: tuple[int, int, bool]
) -> None:
    assert_undisturbed(FAULTS, layout, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("faults", "layout"),
    [
        (("flipped bit", "read-only folder", "clock set back"), (2, 1, False)),
        pytest.param(
            ("second start", "kill in state_dict", "freeze"), (2, 1, True), marks=pytest.mark.long
        ),
        pytest.param(MORE_FAULTS, (2, 2, True), marks=pytest.mark.long),
        pytest.param(MORE_FAULTS, (3, 1, True), marks=pytest.mark.long),
    ],
)
def test_what_an_operator_does_to_a_run_changes_no_bit(
    tmp_path: Path, faults: tuple[str, ...], layout: tuple[int, int, bool]
) -> None:
    for report in assert_undisturbed(faults, layout, tmp_path):
        fault, codes = report["plan"]["fault"], report["codes"]
        if fault == "second start":  # it is told so, and ends
            assert all(report["second"]), report
        if fault.startswith("kill in"):
            assert all(codes[1]), report
        if fault in ("freeze", "clock set back", "read-only folder") and report["starts"] == 1:
            assert not any(codes[1]), report


def assert_undisturbed(
    faults: tuple[str, ...], layout: tuple[int, int, bool], folder: Path
) -> list[dict[str, Any]]:
    plans = make_plans(len(faults), seed=7, layouts=(layout,), faults=faults)
    job = Path(__file__).parent / "drill_job.py"
    done = subprocess.run(
        [sys.executable, str(job), str(folder), json.dumps(plans)],
        env=environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["plan"]["fault"] for report in reports} == set(faults)
    for report in reports:
        assert report["differing"] == 0, report
        assert (report["hung"], report["left_behind"], report["lost"]) == (0, 0, False), report
        assert report["starts"] == 2 or report["plan"]["fault"] == "freeze", report
    return reports


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with started(*TRAIN, "--out", str(folder)) as run:
        _, errors = run.communicate(timeout=100)
    assert run.returncode == 0, errors
    return Run.load(folder)


def assert_same_run(ours: Run, theirs: Run) -> None:
    """The same weights, metrics and lags; only times may differ."""
    states = [load_weights(run.folder / "model.safetensors") for run in (ours, theirs)]
    assert_same_bits(*states)
    times = {"time_s", "rows_per_s"}
    ours_lines, theirs_lines = (
        [{key: value for key, value in line.items() if key not in times} for line in run.metrics]
        for run in (ours, theirs)
    )
    assert ours_lines == theirs_lines
    for key in ("status", "steps", "loss", "lags"):
        assert ours.summary[key] == theirs.summary[key], key


def wait_for_checkpoint(folder: Path, run: subprocess.Popen[Any], after: int = 0) -> None:
    deadline = time.monotonic() + 100
    while not any(int(path.name[5:]) > after for path in (folder / "checkpoints").glob("step-*")):
        assert run.poll() is None, run.stderr and run.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)], ids=str
)
def test_train_goes_on_where_it_was_stopped(
    tmp_path: Path, undisturbed: Run, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    with started(*TRAIN, "--out", str(folder), "--save-every", "7", "--resume") as run:
        wait_for_checkpoint(folder, run)
        run.send_signal(number)
        out, errors = run.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert run.returncode == -9
    else:  # it saved where it stood, and says how to go on
        assert run.returncode == 130, errors
        assert f"to go on: offbeat train --resume --out {folder}" in out
        steps = Run.load(folder).summary["steps"]
        assert (folder / "checkpoints" / f"step-{steps:06}").exists()
    with started("-m", "offbeat", "train", "--resume", "--out", str(folder)) as again:
        out, errors = again.communicate(timeout=100)
    assert again.returncode == 0, errors
    assert "going on after step" in out
    assert_same_run(Run.load(folder), undisturbed)


@pytest.mark.timeout(240)
def test_a_killed_rank_leads_to_a_restart_that_resumes_by_itself(
    tmp_path: Path, undisturbed: Run
) -> None:
    folder = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "--max-restarts", "2", *TRAIN]
    with started(*command, "--out", str(folder), "--save-every", "7", "--resume") as run:
        wait_for_checkpoint(folder, run)
        os.kill(children_of(run.pid)[1], signal.SIGKILL)
        out, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert "going on after step" in out
    assert_same_run(Run.load(folder), undisturbed)
