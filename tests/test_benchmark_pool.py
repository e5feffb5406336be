"""benchmarks/pool.py hands runs to processes that share a GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.accuracy.configurations import SETS
from benchmarks.accuracy.training import Job, gib_of
from benchmarks.pool import first_that_fits, need

ROOT = Path(__file__).parent.parent
SCRIPT = """
import os, sys, time
from pathlib import Path
from benchmarks.pool import Pool

def prepared(until):
    def run(path):
        Path(path).write_text(str(os.getpid()))
        while True:
            time.sleep(0.01)
    return run

if __name__ == "__main__":
    Pool(prepared, print, parallel=1, limit_s=60.0).finish([sys.argv[1]])
"""


def test_a_killed_command_leaves_no_run_behind(tmp_path: Path) -> None:
    """Also where it was started in the background, with interrupts ignored."""
    script, said = tmp_path / "command.py", tmp_path / "pid"
    script.write_text(SCRIPT)
    settings = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    with subprocess.Popen(
        [sys.executable, str(script), str(said)],
        env=settings,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as command:
        while not (said.exists() and said.read_text()):
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(signal.SIGKILL)
    process = Path("/proc", said.read_text())
    for _ in range(200):
        if not process.exists() or "Z" in (process / "stat").read_text().rpartition(")")[2]:
            return
        time.sleep(0.05)
    os.kill(int(process.name), signal.SIGKILL)
    raise AssertionError("the run went on without its command")


def test_runs_beside_each_other_find_enough_of_what_they_share() -> None:
    assert first_that_fits([80, 30, 10], [], 100) == 0
    assert first_that_fits([80, 30, 10], [75], 100) == 2
    assert first_that_fits([80, 30], [75], 100) is None
    assert first_that_fits([], [75], 100) is None
    assert first_that_fits([180, 30], [], 100) == 0  # alone it may try


def test_what_a_run_takes_of_the_gpu_is_about_what_was_seen() -> None:
    """GiB on an H200: benchmarks/accuracy's stored ``memory_gib`` of first runs of a process."""

    def run(network: str, stages: int, way: str) -> Job:
        return Job(
            network=network, stages=stages, cuts=None, ppv=None, way=way, seeds=(0, 1, 2, 3, 4),
            epochs=10, rows=50_000, batch=128, lr=0.1, momentum=0.9, weight_decay=5e-4, bf16=True,
        )  # fmt: skip

    assert 3 < gib_of(run("resnet-56", 1, "BP")) < 6  # 4.4
    assert 35 < gib_of(run("resnet-56", 20, "1F1B, stash")) < 45  # 41.4
    assert 9 < gib_of(run("resnet-20", 8, "1F1B, stash")) < 12  # 10.7
    assert 14 < gib_of(run("resnet-20", 8, "stale, stash")) < 20  # 16.8
    for of in SETS.values():
        for way in of.ways:
            assert gib_of(run(of.network, of.cuts[0].stages or 2, way)) > 1


def test_a_command_that_cannot_begin_says_so_before_any_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"finds no NVIDIA GPU. --device cpu tries it out."):
        need("cuda", tmp_path, instead="--device cpu tries it out.")
    with pytest.raises(SystemExit, match="nowhere: no such folder"):
        need("cpu", tmp_path / "nowhere")
    need("cpu", tmp_path)
