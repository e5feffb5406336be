"""Disturbs training runs at planned moments, starts them again and compares how they end.

    python drill_job.py FOLDER '[{"fault": "kill one", "method": 8, "at": 12, ...}]' [SECONDS]

A run resumes from its folder, trains and saves every few steps, as a user's script would. It is
started twice: once undisturbed, once with one fault, after which all its processes are started
again, as torchrun would do. What is printed, one line of JSON per plan, says how many tensors
differ at the end, whether anybody hung or was left behind and whether a checkpoint was lost. Torch
is imported once; every process is a fork that goes on as a main program of its own.
"""

from __future__ import annotations

import errno
import faulthandler
import hashlib
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint_jobs import AVERAGINGS, CORRECTED, METHODS, fit, fresh, job_of, reading
from kill_job import free_port, left_behind, warm_up, watch
from offbeat.checkpoints.folder import candidates
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.records import disk

STEPS = 40
FAULTS = ("kill one", "kill all", "terminate", "interrupt", "full disk", "truncated file")
MORE_FAULTS = (
    "flipped bit", "second start", "read-only folder", "clock set back", "freeze",
    "kill in state_dict", "kill in evaluate",
)  # fmt: skip
_SIGNALS = {"terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
_PAUSE_S = 0.004
"""Between two steps, so that a fault may also come between them."""
_LIMIT_S = 60
Plan = dict[str, Any]


class Marks:
    """Numbers that all processes of a run see: the steps taken, and the last safe checkpoint."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 32)

    def set(self, place: int, value: int) -> None:
        self._memory[8 * place : 8 * place + 8] = struct.pack("<q", value)

    def get(self, place: int) -> int:
        found: int = struct.unpack("<q", self._memory[8 * place : 8 * place + 8])[0]
        return found

    STEP, SAFE, INSIDE = 0, 1, 2
    """``INSIDE``: 1 while the call lasts in which somebody is to be killed, 2 once all is over."""


def make_plans(
    count: int,
    seed: int,
    layouts: tuple[tuple[int, int, bool], ...],
    faults: tuple[str, ...] = FAULTS,
) -> list[Plan]:
    """Random moments; faults, methods, averagings, corrections and layouts take turns."""
    draw = random.Random(seed)
    methods, averagings = _in_turn(len(METHODS), draw), _in_turn(len(AVERAGINGS), draw)
    corrected = _in_turn(len(CORRECTED), draw)
    plans = []
    for number in range(count):
        stages, replicas, apart = layouts[number % len(layouts)]
        method, every = next(methods), draw.choice([1, 2, 3, 5])
        try:
            METHODS[method].schedule(stages)
        except ConfigurationError:  # its lags are given for three stages
            stages, replicas = 3, 1
        corrections = next(corrected)
        if not fit(CORRECTED[corrections], METHODS[method], stages):
            corrections = 0  # none
        plans.append(
            {
                "fault": faults[number // len(layouts) % len(faults)],
                "model": draw.choice(["cnn", "dropout"]),
                "method": method,
                "averaging": next(averagings) if replicas > 1 else None,
                "corrections": corrections,
                "stages": stages,
                "replicas": replicas,
                "processes": stages * replicas if apart else 1,
                "every": every,
                "at": draw.randrange(2 * every + 1, STEPS - 7),
                "delay_s": draw.uniform(0, 0.02),
                "seed": draw.randrange(1 << 30),
            }
        )
    return plans


def _in_turn(count: int, draw: random.Random) -> Iterator[int]:
    """All numbers in random order, again and again."""
    while True:
        yield from draw.sample(range(count), count)


# ------------------------------------------------------------------------- one process


def train(plan: Plan, folder: Path, marks: Marks | None) -> None:
    """What a user writes. ``marks`` is None for the undisturbed run, which saves nothing."""
    averaging = plan["averaging"]
    trainer = fresh(
        plan["model"],
        METHODS[plan["method"]],
        stages=plan["stages"],
        replicas=plan["replicas"],
        averaging=None if averaging is None else AVERAGINGS[averaging],
        corrections=CORRECTED[plan["corrections"]],
    )
    place = folder / "checkpoints"
    hook_trouble(plan, marks)
    start = trainer.resume(place).step
    _, batches = job_of(plan["model"], STEPS)
    for n, (x, y) in enumerate(trainer.batches(batches[start:]), start + 1):
        trainer.step(x, y)
        if marks is not None:
            time.sleep(_PAUSE_S)
            if trainer.rank == 0:
                marks.set(Marks.STEP, n)
            if plan["fault"] == "full disk":
                full = plan["at"] <= n < plan["at"] + 4
                most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if full else most, most))
            if n == plan["at"] and plan["fault"] in _INSIDE and marks.get(Marks.INSIDE) == 0:
                look_for_long(trainer, plan, marks)
            if n % plan["every"] == 0:
                save(trainer, place, n, plan, marks)
    trainer.flush()
    trainer.finish_saving()
    state, ledger = trainer.state_dict(), reading(trainer)
    if trainer.rank == 0:
        digest = hashlib.sha256(repr(ledger).encode()).hexdigest()
        torch.save({"state": state, "ledger": digest}, folder / "aside")
        (folder / "aside").rename(folder / "end.pt")


_INSIDE = {"kill in state_dict": "state_dict", "kill in evaluate": "evaluate"}


def look_for_long(trainer: Any, plan: Plan, marks: Marks) -> None:
    """Reads the weights, or evaluates, until somebody is killed in the middle of it."""
    _, data = job_of(plan["model"], 2)
    trainer.state_dict()
    marks.set(Marks.INSIDE, 1)
    for _ in range(2000):
        if plan["fault"] == "kill in state_dict":
            trainer.state_dict()
        else:
            trainer.evaluate(data)


def hook_trouble(plan: Plan, marks: Marks | None) -> None:
    """What needs no rights to happen to a process: a folder it may not write to, a clock."""
    if marks is None:
        return
    at, there = plan["at"], time.time

    def hindered() -> bool:
        return bool(at <= marks.get(Marks.STEP) < at + 4)

    if plan["fault"] == "read-only folder":
        make = disk.make_folder

        def make_or_fail(path: Path) -> None:
            if hindered():
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            make(path)

        disk.make_folder = make_or_fail
    if plan["fault"] == "clock set back":
        time.time = lambda: there() - (3600 if marks.get(Marks.STEP) >= at else 0)


def save(trainer: Any, place: Path, step: int, plan: Plan, marks: Marks) -> None:
    try:
        trainer.save(place, keep=2)
    except CheckpointError as error:
        if "DRILL_SECOND" in os.environ or "already holds" in str(error):
            raise
        return  # of the last one: the disk was full
    if trainer.rank == 0 and step - plan["every"] > 0:
        # The one before has been waited for; two saves ago if it failed.
        newest = max((each.step for each in candidates(place)), default=0)
        marks.set(Marks.SAFE, min(newest, step - plan["every"]))


def become(rank: int, plan: Plan, port: int, output: Path) -> None:
    os.setpgid(0, 0)
    signal.alarm(2 * _LIMIT_S)
    # A shell lets its background jobs ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.dump_traceback_later(_LIMIT_S - 5)  # before it counts as hung
    if plan["processes"] > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(plan["processes"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


# ------------------------------------------------------------------------- all of them


def started(plan: Plan, folder: Path, marks: Marks | None, *, second: bool = False) -> list[int]:
    """``second``: of a start on a folder in which a run is under way."""
    folder.mkdir(exist_ok=True)
    port, pids = free_port(), []
    for rank in range(plan["processes"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            become(rank, plan, port, folder / f"output-{rank}{'-second' if second else ''}")
            if second:
                os.environ["DRILL_SECOND"] = "1"
            train(plan, folder, marks)
            sys.exit(0)
    return pids


def disturb(plan: Plan, pids: list[int], marks: Marks) -> str:
    """Waits for the moment and strikes; returns what was done.

    A disk that is full is full for 4 steps, from the moment on, and soon afterwards all are killed.
    """
    draw = random.Random(plan["seed"])
    later = plan["fault"] in ("full disk", "read-only folder", "clock set back")
    moment = plan["at"] + (draw.randrange(1, 6) if later else 0)
    inside = plan["fault"] in _INSIDE
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        if marks.get(Marks.INSIDE) if inside else marks.get(Marks.STEP) >= moment:
            break
        time.sleep(0.0005)
    time.sleep(plan["delay_s"])
    if plan["fault"] == "freeze":
        return freeze(pids if draw.random() < 0.5 else [draw.choice(pids)], draw.uniform(0, 2))
    victims = [draw.choice(pids)] if plan["fault"] == "kill one" or inside else pids
    for pid in victims:
        try:
            os.kill(pid, _SIGNALS.get(plan["fault"], signal.SIGKILL))
        except ProcessLookupError:
            return "too late"
    return f"after step {marks.get(Marks.STEP)}"


def freeze(pids: list[int], seconds: float) -> str:
    """Stops some processes and lets them go on."""
    try:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(seconds)
            seconds = 0.0
    except ProcessLookupError:
        return "too late"
    return f"{len(pids)} frozen"


def damage(plan: Plan, folder: Path) -> str:
    """Cuts a file of the newest checkpoint short, or flips a bit, if there is an older one."""
    found = candidates(folder / "checkpoints")
    if len(found) < 2:
        return "nothing damaged: there is one checkpoint at most"
    draw = random.Random(plan["seed"])
    file = draw.choice(sorted(found[0].path.iterdir()))
    place = draw.randrange(file.stat().st_size)
    if plan["fault"] == "truncated file":
        os.truncate(file, place)
        return f"{file.name} of step {found[0].step} truncated"
    bit = draw.randrange(8)
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} of {file.name} of step {found[0].step} flipped"


def lost(folder: Path, marks: Marks) -> bool:
    """Whether the newest checkpoint that was known to be complete is not there any more."""
    good = [
        each.step
        for each in candidates(folder / "checkpoints")
        if each.problem(list((each.manifest or {"files": {}})["files"])) is None
    ]
    return marks.get(Marks.SAFE) > max(good, default=0)


def differing(ours: Path, theirs: Path) -> int:
    """Tensors that are not the same to the bit, and the ledger; -1 where a run has no end."""
    if not (ours / "end.pt").exists() or not (theirs / "end.pt").exists():
        return -1
    one, two = (torch.load(place / "end.pt", weights_only=True) for place in (ours, theirs))
    if list(one["state"]) != list(two["state"]):
        return -1
    different = [n for n, v in two["state"].items() if not torch.equal(one["state"][n], v)]
    return len(different) + int(one["ledger"] != two["ledger"])


def carry_out(plan: Plan, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    report: dict[str, Any] = {"plan": plan, "hung": 0, "left_behind": 0, "starts": 1}

    def wait_for(pids: list[int]) -> list[int | None]:
        codes = [code for code, _ in watch(pids, _LIMIT_S)]
        report["hung"] += codes.count(None)
        report["left_behind"] += sum(map(left_behind, pids))
        return codes

    undisturbed = wait_for(started(plan, folder / "whole", None))
    marks = Marks()
    pids = started(plan, folder / "cut", marks)
    if plan["fault"] == "second start":
        while marks.get(Marks.SAFE) == 0 and marks.get(Marks.STEP) < plan["at"]:
            time.sleep(0.0005)
        report["second"] = wait_for(started(plan, folder / "cut", Marks(), second=True))
    report["moment"] = disturb(plan, pids, marks)
    struck = codes = wait_for(pids)
    marks.set(Marks.INSIDE, 2)
    report["lost"] = lost(folder / "cut", marks)
    if plan["fault"] in ("truncated file", "flipped bit") and any(codes):
        report["moment"] += "; " + damage(plan, folder / "cut")
    if any(codes):
        report["starts"] += 1
        codes = wait_for(started(plan, folder / "cut", marks))
    report["codes"] = [undisturbed, struck, codes]
    report["differing"] = differing(folder / "cut", folder / "whole")
    if report["differing"] or report["hung"]:
        report["texts"] = [file.read_text() for file in sorted((folder / "cut").glob("output-*"))]
    return report


def main() -> None:
    folder, plans = Path(sys.argv[1]), json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warm_up()
    enough_s = time.monotonic() + float(sys.argv[3]) if len(sys.argv) > 3 else float("inf")
    for number, plan in enumerate(plans):
        if time.monotonic() > enough_s:
            break
        print(json.dumps(carry_out(plan, folder / str(number))), flush=True)


if __name__ == "__main__":
    main()
