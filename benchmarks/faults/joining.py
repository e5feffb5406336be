"""Replicas that are killed at random moments and come back: do they join, and do all agree?

    python benchmarks/faults/joining.py --moments 30 --seed 1 --out benchmarks/faults/joining.jsonl

Every moment is a run of ``offbeat.launch(..., go_on=True, restart=2)``. A random process is killed
with SIGKILL at a random time in training; in half of the runs one of those that come back is killed
again, at a random time between its start and well after its joining, or else a process of another
replica while the first is on its way. Replica 0 is left alone, so that somebody always is.
"""

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

import offbeat  # noqa: E402
from helpers import OPTIMIZERS, trainer_for, vector_batches  # noqa: E402
from jobs import dropout_net  # noqa: E402
from offbeat.averaging import AllReduce, Averaging, DaSGD, DiLoCo, LocalSGD  # noqa: E402
from offbeat.elastic.door import return_number  # noqa: E402
from offbeat.engines.feed import checksum_of  # noqa: E402
from offbeat.engines.processes import Processes  # noqa: E402
from offbeat.errors import OffbeatError, WorkerLost  # noqa: E402

STEPS = 720
_PAUSE_S = 0.01
"""After each step, so that a replica that comes back finds the others still training."""
_HOLD, _HOLD_S = 480, 60.0
"""From this step on the others wait so long for one that is away: a busy machine starts slowly."""
_LIMIT_S = 150.0
LAYOUTS = ((3, 1), (2, 1), (2, 2), (3, 1))
"""Replicas and stages."""
AVERAGINGS: tuple[Averaging, ...] = (
    LocalSGD(2), AllReduce(), DaSGD(2, 1), DiLoCo(3), LocalSGD(1, compress="int8"),
)  # fmt: skip
Plan = dict[str, Any]


def make_plans(count: int, seed: int) -> list[Plan]:
    draw = random.Random(seed)
    plans = []
    for number in range(count):
        replicas, stages = LAYOUTS[number % len(LAYOUTS)]
        victim = draw.randrange(stages, replicas * stages)
        kills: list[Plan] = [{"rank": victim, "life": 0, "at": draw.randrange(3, 60),
                  "delay_s": draw.uniform(0, 0.03)}]  # fmt: skip
        if number % 2:
            second = draw.randrange(stages, replicas * stages)
            if second // stages == victim // stages:
                # Building its trainer, connecting, joining, or training again.
                kills.append(
                    {"rank": second, "life": 1, "at": None, "delay_s": draw.uniform(0, 1.5)}
                )
            else:
                kills.append({"rank": second, "life": 0, "at": draw.randrange(20, 300),
                              "delay_s": draw.uniform(0, 0.03)})  # fmt: skip
        plans.append(
            {
                "replicas": replicas,
                "stages": stages,
                "averaging": draw.randrange(len(AVERAGINGS)),
                "kills": kills,
            }
        )
    return plans


def train(plan: Plan) -> dict[str, Any]:
    """What a user writes, in every process, the killed ones included."""
    rank, life = int(os.environ["RANK"]), return_number()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    kills = [kill for kill in plan["kills"] if (kill["rank"], kill["life"]) == (rank, life)]
    for kill in kills:
        if kill["at"] is None:
            threading.Timer(kill["delay_s"], die).start()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    trainer = trainer_for(
        dropout_net(),
        offbeat.StaleWeights() if plan["stages"] > 1 else offbeat.Synchronous(),
        OPTIMIZERS["momentum"],
        stages=plan["stages"],
        replicas=plan["replicas"],
        averaging=AVERAGINGS[plan["averaging"]],
        seed=3,
        timeout=60.0,
        when_replica_dies="go on",
    )
    batches = vector_batches(12, rows=12, dtype=torch.float32) * (STEPS // 12)
    held_s = 0.0
    for x, y in trainer.batches(batches):
        for kill in kills:
            if kill["at"] == trainer._pipeline.position.step:
                threading.Timer(kill["delay_s"], die).start()
        trainer.step(x, y)
        time.sleep(_PAUSE_S)
        while (
            trainer._pipeline.position.step >= _HOLD
            and held_s < _HOLD_S
            and is_awaited(trainer, said)
        ):
            time.sleep(_PAUSE_S)
            held_s += _PAUSE_S
    trainer.flush()
    return {
        "digest": checksum_of(list(trainer.state_dict().values())),
        "steps": trainer._pipeline.position.step,
        "gone": sum("is gone" in words for words in said),
        "back": sum("is back" in words for words in said),
        "joined_at": trainer._engine.joined_at,
    }


def is_awaited(trainer: offbeat.Trainer, said: list[str]) -> bool:
    """Whether a replica is away and steps are not what it takes to let it in."""
    assert isinstance(trainer._engine, Processes)
    door = trainer._engine.door
    away = sum(("is gone" in words) - ("is back" in words) for words in said)
    return away > 0 and door is not None and door._promised is None and door._admission is None


def left_behind() -> int:
    command = ["ps", "-o", "args=", "--ppid", str(os.getpid())]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return listing.count("offbeat.engines.child")


def carry_out(plan: Plan) -> dict[str, Any]:
    started = time.monotonic()
    size = plan["replicas"] * plan["stages"]
    report: dict[str, Any] = {"plan": plan}
    try:
        found = offbeat.launch(train, size, plan, timeout_s=_LIMIT_S, go_on=True, restart=2)
    except OffbeatError as error:
        found = [None] * size
        report["error"] = str(error)
        report["hung"] = isinstance(error, WorkerLost) and "gave up" in str(error)
    ended = [rank for rank, result in enumerate(found) if result is not None]
    digests = {found[rank]["digest"] for rank in ended}
    first = found[0] or {"gone": 0, "back": 0}
    return report | {
        "hung": report.get("hung", False),
        "left_behind": left_behind(),
        "ended": ended,
        "missing": [rank for rank in range(size) if rank not in ended],
        "differing": len(digests) != 1 or any(found[rank]["steps"] != STEPS for rank in ended),
        "joined_at": first.get("joined_at"),
        "gone": first["gone"],
        "back": first["back"],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    reports = []
    for plan in make_plans(given.moments, given.seed):
        report = carry_out(plan)
        reports.append(report)
        words = {name: value for name, value in report.items() if name != "plan"}
        print(len(reports), plan["replicas"], plan["stages"], len(plan["kills"]), words, flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(report | {"seed": given.seed}) + "\n")
    summary = {
        "moments": len(reports),
        "kills": sum(len(report["plan"]["kills"]) for report in reports),
        "returns": sum(report["back"] for report in reports),
        "not back": sum(bool(report["missing"]) for report in reports),
        "differing": sum(report["differing"] for report in reports),
        "hung": sum(report["hung"] for report in reports),
        "left_behind": sum(report["left_behind"] for report in reports),
    }
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
