"""Accuracy of averaging methods on CIFAR-10: the same samples, eight replicas in one process.

Many small runs share one GPU, a process each. Every run is appended to the results as it ends.

    python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz parts
    python -m benchmarks.averaging.run --data parts --out benchmarks/averaging/results.jsonl
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from benchmarks.averaging import mps
from benchmarks.averaging.configurations import CONFIGURATIONS
from benchmarks.averaging.data import PARTS, parts_in, rows_in
from benchmarks.averaging.pool import Place, Pool, Reply
from benchmarks.averaging.summary import key_of, read, table
from benchmarks.averaging.training import Job, Replay, Setting

ALIKE = 0.02
"""How far graphs may be from plain autograd: TF32 rounds at 1e-3, a wrong graph is off by 1."""
BESIDE_S = 4.0
"""Seconds of a run beside its steps: building, capturing, scoring."""
MARGIN_S = 10.0


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the folder that pack.py wrote")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), help="appended to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parallel", type=int, default=14, help="processes")
    parser.add_argument("--limit-s", type=float, default=1e6, help="for everything")
    parser.add_argument("--only", default="*", help="as in 'AllReduce;DaSGD(4*'")
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ...")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.2], help="peak, for all alike")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fit", action="store_true", help="fewer epochs if the limit asks for it")
    parser.add_argument("--least-epochs", type=int, default=4, help="that --fit goes down to")
    parser.add_argument("--rows", type=int, default=None, help="the first N training images")
    parser.add_argument("--test-rows", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rows-per-replica", type=int, default=64)
    parser.add_argument("--model", default="20", help="depth of the ResNet, or cnn")
    parser.add_argument("--replay", choices=["auto", "eager", "graphs"], default="auto")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--no-mps", action="store_true")
    arguments = parser.parse_args()
    if arguments.replay == "graphs" and not arguments.device.startswith("cuda"):
        parser.error("--replay graphs needs --device cuda")
    return arguments


def setting_of(arguments: argparse.Namespace) -> Setting:
    there = parts_in(arguments.data)
    rows = rows_in(arguments.data)
    if len(there) < PARTS["train"]:
        print(f"only parts {there} of {PARTS['train']}: {rows} training images", flush=True)
    wanted = rows if arguments.rows is None else min(rows, arguments.rows)
    setting = Setting(
        model=arguments.model,
        rows=wanted,
        test_rows=arguments.test_rows,
        epochs=arguments.epochs,
        replicas=arguments.replicas,
        rows_per_replica=arguments.rows_per_replica,
        momentum=0.9,
        weight_decay=5e-4,
        autocast=arguments.bf16,
        channels_last=arguments.channels_last,
        replay="graphs" if arguments.replay == "graphs" else "eager",
    )
    if wanted < setting.batch:
        raise SystemExit(f"{wanted} training images make no batch of {setting.batch}.")
    return setting


def jobs_of(arguments: argparse.Namespace, setting: Setting) -> list[Job]:
    """Seed by seed, so that whatever the time allows is a complete comparison or nearly."""
    patterns = arguments.only.split(";")
    names = [n for n in CONFIGURATIONS if any(fnmatch(n, p.strip()) for p in patterns)]
    if not names:
        raise SystemExit(f"--only {arguments.only}: there are {'; '.join(CONFIGURATIONS)}")
    return [
        Job(configuration=name, seed=seed, lr=lr, setting=setting)
        for seed in range(arguments.seeds)
        for lr in arguments.lr
        for name in names
    ]


def measured_step(pool: Pool, job: Job) -> float | None:
    """Seconds per step with all processes at work; None if that way of running is no good."""
    asked, replies = len(pool), pool.probe(job)
    replay = job.setting.replay
    errors = [reply["error"] for reply in replies if "error" in reply]
    if errors or len(replies) < asked:
        print(f"{replay}: {len(errors)} errors, {asked - len(replies)} silent; {errors[:1]}")
        return None
    worst = max(reply.get("difference", 0.0) for reply in replies)
    step_s = fmean(reply["step_s"] for reply in replies)
    print(f"{replay}: {1000 * step_s:.0f} ms per step in {asked} processes", end="")
    print(f", gradients off by {worst:.1e}" if replay == "graphs" else "", flush=True)
    return step_s if worst <= ALIKE else None


def ways_to_run(arguments: argparse.Namespace) -> list[Replay]:
    if arguments.replay == "auto" and arguments.device.startswith("cuda"):
        return ["eager", "graphs"]
    return ["graphs" if arguments.replay == "graphs" else "eager"]


def fastest(pool: Pool, job: Job, ways: Sequence[Replay]) -> tuple[Replay, float, bool]:
    """The fastest of the ways to run that work here, its seconds per step, whether all work."""
    found: dict[Replay, float] = {}
    for way in ways:
        step_s = measured_step(pool, replace(job, setting=replace(job.setting, replay=way)))
        if step_s is not None:
            found[way] = step_s
    if not found:
        raise SystemExit("nothing works here")
    best = min(found, key=lambda way: found[way])
    return best, found[best], len(found) == len(ways)


def run_seconds(setting: Setting, step_s: float) -> float:
    return setting.steps * step_s + BESIDE_S


def fitted(setting: Setting, step_s: float, waves: int, seconds: float, least: int) -> Setting:
    """As many epochs as the time allows, at most those asked for."""
    for epochs in range(setting.epochs, least, -1):
        smaller = replace(setting, epochs=epochs)
        if waves * run_seconds(smaller, step_s) <= seconds:
            return smaller
    return replace(setting, epochs=min(setting.epochs, least))


def environment(device: str, processes: int, served: bool) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "cores": os.cpu_count(),
        "parallel": processes,
        "mps": served,
    }


def measure(arguments: argparse.Namespace, served: bool, began: float) -> list[Job]:
    until = began + arguments.limit_s - MARGIN_S
    setting = setting_of(arguments)
    place = Place(
        data=arguments.data,
        rows=setting.rows,
        test_rows=arguments.test_rows,
        device=arguments.device,
    )
    count = min(arguments.parallel, len(jobs_of(arguments, setting)))
    pool = Pool(count, place)
    try:
        if not len(pool):
            raise SystemExit("no process came up; their messages are above")
        print(f"{len(pool)} processes after {time.monotonic() - began:.0f} s", flush=True)
        # Local SGD is neither the cheapest nor the dearest.
        sample = Job(configuration="LocalSGD(4)", seed=0, lr=0.01, setting=setting)
        replay, step_s, all_work = fastest(pool, sample, ways_to_run(arguments))
        if not all_work:  # what failed may have left its process unusable
            pool.close()
            pool = Pool(count, place)
        setting = replace(setting, replay=replay)
        runs = len(jobs_of(arguments, setting))
        waves, left = math.ceil(runs / len(pool)), until - time.monotonic()
        if arguments.fit:
            setting = fitted(setting, step_s, waves, left, arguments.least_epochs)
        expected = run_seconds(setting, step_s)
        print(
            f"{replay}, {setting.epochs} epochs: {runs} runs of {expected:.0f} s in {waves} waves,"
            f" {waves * expected:.0f} s expected, {left:.0f} s left",
            flush=True,
        )
        where = environment(pool.device, len(pool), served)
        known = {key_of(row) for row in read(arguments.out)} if arguments.out.exists() else set()
        jobs = [job for job in jobs_of(arguments, setting) if key_of(job.words()) not in known]

        def done(job: Job, reply: Reply) -> None:
            kept = CONFIGURATIONS[job.configuration].kept
            averaging = repr(CONFIGURATIONS[job.configuration].averaging)
            row = job.words() | {"kept": kept, "averaging": averaging} | reply
            with arguments.out.open("a") as file:
                file.write(json.dumps(row | {"environment": where}) + "\n")
            print(
                f"{time.monotonic() - began:5.0f} s  seed {job.seed}  {job.configuration}:"
                f" {reply['accuracy']:.2%}, replica 0 {reply['replica_accuracy']:.2%}"
                f" ({reply['seconds']:.0f} s)",
                flush=True,
            )

        return pool.run(jobs, until=until, expected_s=expected, done=done)
    finally:
        pool.close()


def main() -> None:
    began = time.monotonic()
    arguments = arguments_of()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    cuda = arguments.device.startswith("cuda")
    with mps.sharing(cuda and not arguments.no_mps) as served:
        print(f"MPS: {served}", flush=True)
        missing = measure(arguments, served, began)
    if missing:
        names = (f"{job.configuration} seed {job.seed}" for job in missing)
        print(f"{len(missing)} runs without a result: {'; '.join(names)}")
    if arguments.out.exists():
        print(table(read(arguments.out)))
    print(f"{time.monotonic() - began:.0f} s in all; raw results: {arguments.out}")


if __name__ == "__main__":
    main()
