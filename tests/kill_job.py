"""Forks rows of training processes, kills one of each row and tells how the others ended.

    python kill_job.py FOLDER '[{"rank": 1, "signal": 9, "phase": "training", "delay_s": 0.05}]'

Torch is imported once; every rank is a fork that goes on as a main program of its own, so that an
error nobody catches ends it as it would end a user's script. Nobody ends the other ranks: what is
printed, one line of JSON per row, is what they did by themselves.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.averaging import LocalSGD
from offbeat.engines.processes import Processes

PHASES = ("start", "joining", "groups", "agreeing", "training", "evaluation", "saving")
_NOBODY_LIVES_LONGER_S = 120
Plan = dict[str, Any]
Mark = Callable[[str], None]


def train(
    mark: Mark, join_s: float | None, stages: int = 3, replicas: int = 1, just_train: bool = False
) -> None:
    """What a user writes, without an end. Replicas never come to an average."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)]
    batches = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(8)]
    mark("joining")
    if join_s is not None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=join_s))
    trainer = offbeat.Trainer(
        nn.Sequential(*layers),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        method=offbeat.StaleWeights(),
        stages=stages,
        replicas=replicas,
        averaging=LocalSGD(1_000_000) if replicas > 1 else None,
        timeout=join_s or 30.0,
    )
    while True:
        mark("training")
        for x, y in trainer.batches(4 * batches):
            trainer.step(x, y)
        if just_train:
            continue
        mark("evaluation")
        for _ in range(8):
            trainer.evaluate(batches)
        mark("saving")
        for _ in range(8):
            trainer.state_dict()


def marker(rank: int, marks: mmap.mmap, plan: Plan) -> Mark:
    """Shows the parent which phase has begun; a plan without a delay dies right there."""

    def mark(phase: str) -> None:
        marks[rank] = PHASES.index(phase)
        if (rank, phase, None) == (plan["rank"], plan["phase"], plan["delay_s"]):
            os.kill(os.getpid(), plan["signal"])

    new_group, agree = dist.new_group, Processes.agree

    def new_group_marked(*args: Any, **settings: Any) -> Any:
        mark("groups")
        return new_group(*args, **settings)

    def agree_marked(*args: Any, **settings: Any) -> Any:
        mark("agreeing")
        return agree(*args, **settings)

    mock.patch.object(dist, "new_group", new_group_marked).start()
    mock.patch.object(Processes, "agree", agree_marked).start()
    return mark


def become(rank: int, ranks: int, port: int, output: Path) -> None:
    """Makes a fork what a launcher would have started, in a process group of its own."""
    os.setpgid(0, 0)
    signal.alarm(_NOBODY_LIVES_LONGER_S)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def warm_up() -> None:
    """Imports what is otherwise imported on first use, once for all ranks; starts no thread.

    Python's collector leaves alone what is there by then: a fork that ends would look at all of it
    once more, which takes a second.
    """
    model = nn.Linear(2, 2)
    offbeat.Trainer([model], loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gc.collect()
    gc.freeze()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def kill(plan: Plan, pid: int, marks: mmap.mmap) -> str:
    """Waits for the phase and the delay after its beginning; returns the phase that was hit."""
    gives_up = time.monotonic() + _NOBODY_LIVES_LONGER_S
    while PHASES[marks[plan["rank"]]] != plan["phase"] and time.monotonic() < gives_up:
        time.sleep(0.001)
    if plan["delay_s"] is not None:
        time.sleep(plan["delay_s"])
        os.kill(pid, plan["signal"])
    return PHASES[marks[plan["rank"]]]


def watch(pids: list[int], limit_s: float) -> list[tuple[int | None, float]]:
    """Exit code and seconds until the end, by rank; no code where it had to be ended here."""
    start = time.monotonic()
    ends: dict[int, tuple[int | None, float]] = {}
    while len(ends) < len(pids) and time.monotonic() < start + limit_s:
        for pid in set(pids) - ends.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[pid] = (os.waitstatus_to_exitcode(status), time.monotonic() - start)
        time.sleep(0.005)
    for pid in set(pids) - ends.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ends[pid] = (None, limit_s)
    return [ends[pid] for pid in pids]


def left_behind(pid: int) -> bool:
    """Whether anything that a rank started outlives it."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    folder, plans = Path(sys.argv[1]), json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warm_up()
    for number, plan in enumerate(plans):
        stages, replicas = plan.get("layout", (3, 1))
        ranks = stages * replicas
        marks, port = mmap.mmap(-1, ranks), free_port()
        files = [folder / f"{number}-{rank}" for rank in range(ranks)]
        pids = []
        for rank in range(ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                become(rank, ranks, port, files[rank])
                mark, just_train = marker(rank, marks, plan), plan.get("just_train", False)
                train(mark, plan.get("join_s"), stages, replicas, just_train)
        hit = kill(plan, pids[plan["rank"]], marks)
        ends = watch(pids, plan["limit_s"])
        report = {
            "plan": plan,
            "hit": hit,
            "ends": ends,
            "texts": [file.read_text() if file.exists() else "" for file in files],
            "left_behind": [rank for rank, pid in enumerate(pids) if left_behind(pid)],
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
