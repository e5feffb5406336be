"""A folder belongs to one run at a time, and a run deletes its own checkpoints only."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offbeat
from checkpoint_jobs import names_in
from helpers import mlp, trainer_for, vector_batches
from offbeat.app.cli import main
from offbeat.app.runs import Run
from offbeat.engines.launcher import launch
from offbeat.errors import CheckpointError, StorageError
from offbeat.methods import StaleWeights
from offbeat.records import disk, lock
from offbeat.records.lock import Lock, holder, state_of, this_process


def begun(folder: Path) -> offbeat.Trainer:
    trainer = trainer_for(mlp(), StaleWeights(), stages=2)
    trainer.resume(folder)
    return trainer


def go(trainer: offbeat.Trainer, steps: int) -> None:
    for x, y in vector_batches(steps):
        trainer.step(x, y)


HOLDS = """
import sys, time
from offbeat.records.lock import Lock, this_process
from pathlib import Path
lock = Lock(Path(sys.argv[1]))
lock.take([this_process()])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "folder")], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


# ------------------------------------------------------------------ checkpoints


def test_the_slower_of_two_runs_deletes_nothing_of_the_faster_one(tmp_path: Path) -> None:
    faster, slower = begun(tmp_path), begun(tmp_path)
    go(faster, 5)
    faster.save(tmp_path, wait=True)
    go(slower, 3)
    with pytest.raises(CheckpointError, match="newest of step 5.*another has saved here since"):
        slower.save(tmp_path, wait=True)
    assert names_in(tmp_path) == ["step-000005"]
    del faster
    with pytest.raises(CheckpointError, match="another has saved here since"):
        slower.save(tmp_path, wait=True)
    assert names_in(tmp_path) == ["step-000005"]
    slower.save(tmp_path / "another place", wait=True)
    again = begun(tmp_path)
    go(again, 1)
    again.save(tmp_path, keep=1, wait=True)
    assert names_in(tmp_path) == ["another place", "step-000006"]


def test_of_two_that_resumed_the_same_the_later_one_goes_on(tmp_path: Path) -> None:
    """As in a script that builds its trainer anew."""
    first = begun(tmp_path)
    go(first, 2)
    first.save(tmp_path, wait=True)
    second = begun(tmp_path)
    go(second, 3)
    second.save(tmp_path, wait=True)
    go(first, 1)
    first.save(tmp_path)
    with pytest.raises(CheckpointError, match="was taken over by process .*saves there no more"):
        first.finish_saving()
    assert names_in(tmp_path) == ["step-000002", "step-000005"]
    second.save(tmp_path, wait=True)
    first.resume(tmp_path)
    first.save(tmp_path, wait=True)


def test_a_folder_that_another_process_holds_is_refused_until_it_ends(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    folder = tmp_path / "folder"
    trainer = begun(folder)
    go(trainer, 1)
    words = f"belongs to another run: process {other.pid} on .* writes there, since"
    with pytest.raises(CheckpointError, match=words):
        trainer.save(folder, wait=True)
    assert names_in(folder) == []
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(CheckpointError, match=words):
        trainer.save(folder, wait=True)
    held = holder(folder)
    assert held is not None
    other.kill()
    deadline = time.monotonic() + 20
    while state_of(held["processes"][0]) == "lives":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.warns(UserWarning, match=f"held by process {other.pid} on .*takes it over"):
        trainer.save(folder, wait=True)  # though nobody has fetched its exit code yet
    assert names_in(folder) == ["step-000001"]
    held = holder(folder)
    assert held is not None
    assert held["processes"][0]["pid"] == os.getpid()
    del trainer
    assert not (folder / ".lock").exists()


def test_a_process_that_ends_leaves_no_lock(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.communicate(timeout=60)
    assert not (tmp_path / "folder" / ".lock").exists()


def test_a_lock_that_was_taken_away_is_set_again(tmp_path: Path) -> None:
    trainer = begun(tmp_path)
    go(trainer, 1)
    trainer.save(tmp_path, wait=True)
    (tmp_path / ".lock").unlink()
    trainer.save(tmp_path, wait=True)
    assert holder(tmp_path) is not None


def claimed(folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    claim = {"token": "0", "processes": [this_process() | changes], "since": "2026-01-01"}
    (folder / ".lock").write_text(disk.sealed(claim))


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"machine": "another"}, {"space": "a container's"}], ids=str
)
def test_a_lock_from_another_host_is_refused_with_the_command_that_takes_it_over(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = tmp_path / "a folder"
    claimed(folder, **changes)
    with pytest.raises(StorageError, match="whether that lives cannot be seen from") as refused:
        Lock(folder).take([this_process()])
    command = str(refused.value).partition("take this one over: ")[2]
    subprocess.run(shlex.split(command), check=True)
    Lock(folder).take([this_process()])


def test_a_damaged_lock_is_refused_with_the_same_command(tmp_path: Path) -> None:
    claimed(tmp_path)
    file = tmp_path / ".lock"
    file.write_text(file.read_text().replace(str(os.getpid()), str(os.getpid() + 1)))
    with pytest.raises(StorageError, match="does not name any more .it is damaged.*rm "):
        Lock(tmp_path).take([this_process()])
    file.write_text("")  # of a process that was killed before it wrote: nobody's
    Lock(tmp_path).take([this_process()])


@pytest.mark.parametrize("changes", [{"boot": "before"}, {"start": "1"}, {"pid": 2**22 + 1}])
def test_processes_that_cannot_be_alive_are_dead(tmp_path: Path, changes: dict[str, Any]) -> None:
    claimed(tmp_path, **changes)
    with pytest.warns(UserWarning, match="which has ended: this run takes it over"):
        Lock(tmp_path).take([this_process()])


def test_torchrun_s_own_restarts_take_over_from_any_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    claimed(tmp_path, host="elsewhere", restart=1)
    with pytest.raises(StorageError, match="cannot be seen"):
        Lock(tmp_path).take([this_process()])
    claimed(tmp_path, host="elsewhere", restart=0)
    with pytest.warns(UserWarning, match="takes it over"):
        Lock(tmp_path).take([this_process()])


def test_what_other_hosts_of_the_run_know_counts(tmp_path: Path) -> None:
    claimed(tmp_path, host="elsewhere")
    held = holder(tmp_path)
    assert held is not None
    with pytest.warns(UserWarning, match="takes it over"):
        Lock(tmp_path).take([this_process()], {lock.key_of(p) for p in held["processes"]})


def save_and_look(folder: str) -> tuple[int, list[int]]:
    path = Path(folder)
    trainer = begun(path)
    go(trainer, 2)
    trainer.save(path, wait=True)
    held = (holder(path) or {}) if trainer.rank == 0 else {}  # it ends with the run
    return os.getpid(), [process["pid"] for process in held.get("processes", ())]


def test_one_lock_names_all_processes_of_a_run(tmp_path: Path) -> None:
    """Two runs of two processes, one after the other."""
    for _ in range(2):
        found = launch(save_and_look, 2, str(tmp_path))
        assert found[0][1] == [pid for pid, _ in found]
    assert names_in(tmp_path) == ["step-000002", "step-000004"]
    assert not (tmp_path / ".lock").exists()


def refused_in_both(folder: str) -> str:
    trainer = trainer_for(mlp(), StaleWeights(), stages=2)
    go(trainer, 1)
    try:
        trainer.save(folder)
    except CheckpointError as error:
        go(trainer, 1)
        return str(error)
    return ""


def test_all_processes_of_a_run_are_refused_alike(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    words = launch(refused_in_both, 2, str(tmp_path / "folder"))
    assert words[0] == words[1]
    assert "belongs to another run" in words[0]


# ------------------------------------------------------------------ runs


def test_a_run_that_is_started_twice_is_refused_the_second_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "--epochs", "20", "--max-steps", "150", "--lr", "0.02"]
    words += ["--save-every", "5", "--out", str(out)]
    first = subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 100
        while not (out / "checkpoints" / "step-000005").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)
        for more in ([], ["--resume"]):
            with pytest.raises(SystemExit) as ended:
                main([*words, *more])
            assert ended.value.code == 2
            assert f"belongs to another run: process {first.pid} on" in capsys.readouterr().err
    finally:
        first.kill()
        first.communicate()
    with pytest.warns(UserWarning, match="takes it over"), pytest.raises(SystemExit):
        main([*words, "--resume"])
    assert Run.load(out).summary["status"] == "finished"
    steps = [line["step"] for line in Run.load(out).metrics if line["kind"] == "step"]
    assert len(steps) == len(set(steps)) > 5
