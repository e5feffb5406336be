"""Any process of a run may be killed: the others end by themselves, soon, and say why.

The rows of processes are started by ``kill_job.py``, which ends nobody: unlike under torchrun or
``offbeat.launch`` no launcher cleans up behind the one that was killed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import offbeat

SIGNALS = [int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGSEGV)]
LATEST_S = {"training": 0.1, "evaluation": 0.06, "saving": 0.02}
"""A kill comes at random up to this long after its phase has begun."""
WORDS = {
    "training": r"WorkerLost: the connection to rank \d broke",
    "evaluation": r"WorkerLost: the connection to rank \d broke",
    "saving": r"WorkerLost: the connection to rank \d broke|WorkerLost: rank \d has",
}


STORE_GONE = r"|WorkerLost: the launcher's store cannot be reached .* rank 0\) has ended"
"""Rank 0 holds the store here, and when it ends too either loss may show first."""


def environment() -> dict[str, str]:
    paths = [str(Path(offbeat.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run_plans(plans: list[dict[str, Any]], folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    job = Path(__file__).parent / "kill_job.py"
    done = subprocess.run(
        [sys.executable, str(job), str(folder), json.dumps(plans)],
        env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_ended(report: dict[str, Any], words: str) -> None:
    plan = report["plan"]
    assert report["left_behind"] == [], plan
    for rank, ((code, _), text) in enumerate(zip(report["ends"], report["texts"], strict=True)):
        if rank == plan["rank"]:
            assert code == -plan["signal"], (plan, text)
        else:
            assert code is not None, f"rank {rank} did not end: {plan}\n{text}"
            assert code != 0, (plan, rank, text)
            assert re.search(words, text), (plan, rank, text)


@pytest.mark.timeout(300)
def test_twenty_random_kills_end_every_process_with_words(tmp_path: Path) -> None:
    draw = random.Random(20)
    plans = []
    for number in range(20):
        phase = list(LATEST_S)[number % 3]
        delay_s = draw.uniform(0, LATEST_S[phase])
        plans.append(
            {
                "rank": draw.randrange(3),
                "signal": draw.choice(SIGNALS),
                "phase": phase,
                "delay_s": delay_s,
                "limit_s": 30.0,
            }
        )
    reports = run_plans(plans, tmp_path, timeout_s=280)
    assert len(reports) == 20
    assert {report["plan"]["rank"] for report in reports} == {0, 1, 2}
    for report in reports:
        # Rank 0 ends whoever was killed, and with it the store.
        assert_all_ended(report, WORDS[report["hit"]] + STORE_GONE)
    # A slow machine may be a phase late; most kills come where they were meant to.
    hits = Counter(report["hit"] == report["plan"]["phase"] for report in reports)
    assert hits[True] > 10, hits


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "where",
    [
        ((0, "joining"), (1, "groups"), (1, "agreeing")),
        pytest.param(((2, "joining"), (2, "groups")), marks=pytest.mark.long),
    ],
)
def test_a_process_that_dies_before_all_have_joined_is_missed(
    tmp_path: Path, where: Sequence[tuple[int, str]]
) -> None:
    """Who is not connected yet waits as long as init_process_group, or the trainer, was told to."""
    words = r"[Tt]imed out|wait timeout|WorkerLost: the connection to rank 1 broke"
    plans = [
        {
            "rank": rank,
            "signal": signal.SIGKILL,
            "phase": phase,
            "delay_s": None,
            "join_s": 3.0,
            "limit_s": 60.0,
        }
        for rank, phase in where
    ]
    for report in run_plans(plans, tmp_path, timeout_s=220):
        assert_all_ended(report, words + STORE_GONE)


def killed_while_training(rank: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """Of a row that does nothing but train."""
    plan = {"rank": rank, "signal": signal.SIGKILL, "phase": "training", "delay_s": 0.1}
    plan |= {"limit_s": 30.0, "just_train": True, **settings}
    (report,) = run_plans([plan], folder, timeout_s=100)
    return report


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", [(3, 1), (2, 2)])
def test_a_death_is_noticed_by_those_who_have_no_connection_to_it(
    layout: tuple[int, int], tmp_path: Path
) -> None:
    """Another replica would train on until the next average, which here never comes."""
    last = layout[0] * layout[1] - 1
    report = killed_while_training(last, tmp_path, layout=layout)
    words = r"WorkerLost: the connection to rank \d broke|WorkerLost: rank \d has"
    assert_all_ended(report, words + STORE_GONE)
    # Rank 0 is told, or its neighbour was and has ended: either way it names what began it.
    cause = rf"rank {last - 1} has ended:\n.*the connection to rank {last} broke"
    assert re.search(cause, report["texts"][0]), report["texts"][0]


@pytest.mark.timeout(120)
def test_what_all_have_seen_for_themselves_is_said_once(tmp_path: Path) -> None:
    """Who ended first began nothing where both have lost the same one."""
    report = killed_while_training(1, tmp_path)
    assert_all_ended(report, r"WorkerLost: the connection to rank 1 broke" + STORE_GONE)
    assert not any("offbeat: rank" in text for text in report["texts"])


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_frozen_process_is_not_waited_for_even_if_it_holds_the_store(tmp_path: Path) -> None:
    plan = {
        "rank": 0,
        "signal": signal.SIGSTOP,
        "phase": "training",
        "delay_s": 0.1,
        "limit_s": 20.0,
        "join_s": 3.0,
    }
    (report,) = run_plans([plan], tmp_path, timeout_s=100)
    assert [code for code, _ in report["ends"]] == [None, 1, 1]
    for text in report["texts"][1:]:
        assert re.search(r"(?s)WorkerLost: no message for 3 s|connection to rank \d broke", text)
    assert any("the launcher's store does not answer" in text for text in report["texts"])


def children_of(parent: int) -> dict[int, int]:
    """Process numbers of the ranks that torchrun started."""
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False
    )
    found: dict[int, int] = {}
    for pid in map(int, listing.stdout.split()):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
        found |= dict.fromkeys(ranks, pid)
    return found


@pytest.mark.timeout(180)
def test_a_kill_under_torchrun_ends_the_run_and_names_rank_and_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            from kill_job import train

            train(lambda phase: print(phase, flush=True), None)
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*command, "--nproc-per-node", "3", str(script)], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            if "evaluation" in line:
                break
        workers = children_of(run.pid)
        assert set(workers) == {0, 1, 2}
        os.kill(workers[1], signal.SIGKILL)
        _, text = run.communicate(timeout=120)
    assert run.returncode != 0
    assert re.search(r"(?s)rank +: 1 .*SIGKILL|Signal 9 \(SIGKILL\)", text), text
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
