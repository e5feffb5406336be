"""Two cores: asynchronous pipelines beside every ordinary way to use them.

From the repository, on an otherwise idle machine:

    python -m benchmarks.two_cores.run --out benchmarks/two_cores/results.jsonl

Every contestant's processes stay alive and take turns. A round lets each train a block of batches
while all others are blocked; the order rotates from round to round.
"""

import argparse
import fnmatch
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.stored import read_result, write_result
from benchmarks.two_cores.cuts import choose
from benchmarks.two_cores.group import Failed, Group, Turn
from benchmarks.two_cores.summary import markdown, say
from benchmarks.two_cores.variants import Variant, all_variants, is_reference

MODELS = ("resnet20", "alexnet", "transformer")
LEAD = 2
"""Untimed batches at the start of a block: caches and memory come back, the pipe gets going."""


def measure_costs(model: str) -> dict[str, Any]:
    """Costs of every layer on one core, from a pinned process of its own."""
    command = [sys.executable, "-m", "benchmarks.two_cores.costs", model]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def waves_of(variants: list[Variant], most: int) -> list[list[Variant]]:
    """Splits contestants so that few enough processes are alive; the references join every wave."""
    references = [variant for variant in variants if is_reference(variant)]
    room = most - sum(variant.processes for variant in references)
    waves: list[list[Variant]] = [[]]
    for variant in variants:
        if is_reference(variant):
            continue
        if sum(v.processes for v in waves[-1]) + variant.processes > max(room, 2):
            waves.append([])
        waves[-1].append(variant)
    # The last wave would be short otherwise: share the contestants out evenly.
    others = [variant for wave in waves for variant in wave]
    return [references + others[index :: len(waves)] for index in range(len(waves))]


def give_up_on(variant: Variant, error: Failed, failed: dict[str, str]) -> None:
    """Goes on without a contestant, but never without the references of the ratios."""
    failed[variant.name] = str(error)
    say(f"  {variant.name} is out: {error}")
    if is_reference(variant):
        raise error


def start(
    variants: list[Variant], model: str, cuts: dict[str, list[int]], failed: dict[str, str]
) -> list[Group]:
    """One contestant after the other, so that the warm-up of one does not disturb another."""
    groups = []
    for variant in variants:
        began = time.monotonic()
        try:
            groups.append(Group(variant, model, cuts[variant.cut] if variant.cut else []))
            say(f"  {variant.name} is ready after {time.monotonic() - began:.0f} s")
        except Failed as error:
            give_up_on(variant, error, failed)
    return groups


def run_round(
    groups: list[Group], number: int, steps: int, failed: dict[str, str]
) -> dict[str, Turn]:
    """Every contestant in its turn; no fixed order."""
    shift = number % len(groups)
    turns = {}
    for group in groups[shift:] + groups[:shift]:
        try:
            turns[group.variant.name] = group.block(LEAD, steps)
        except Failed as error:
            groups.remove(group)
            group.close()
            give_up_on(group.variant, error, failed)
    return {group.variant.name: turns[group.variant.name] for group in groups}


def run_wave(groups: list[Group], wave: dict[str, Any], rounds: int, block_s: float) -> None:
    """Plays the rounds of one wave; what has been measured is in ``wave`` at any time."""
    unit = groups[0]
    assert unit.variant.name == "one-core"
    steps = max(2, math.ceil(block_s / unit.block(1, 2).seconds))
    wave["steps_per_block"] = steps
    for number in range(rounds):
        turns = run_round(groups, number, steps, wave["failed"])
        wave["rounds"].append({name: asdict(turn) for name, turn in turns.items()})
        one, stale = turns["one-core"].seconds, turns["offbeat-stale-weights"].seconds
        foreign = statistics.mean(turn.foreign_share for turn in turns.values())
        say(
            f"  round {number + 1}: one core {one:.3f} s, StaleWeights {one / stale:.3f} times,"
            f" others took {foreign:.1%} of the machine"
        )
    wave["losses"] = {group.variant.name: group.loss for group in groups}
    wave["memory_bytes"] = {group.variant.name: group.memory_bytes() for group in groups}


def run_model(
    model: str, variants: list[Variant], arguments: argparse.Namespace, result: dict[str, Any]
) -> None:
    began = time.monotonic()
    say(f"{model}: measuring every layer on one core")
    costs = measure_costs(model)
    cuts = choose(costs)
    used = {variant.cut for variant in variants}
    result |= {
        "batch": costs["batch"], "parameters": costs["parameters"],
        "environment": environment(), "costs": costs,
        "cuts": {name: cut for name, cut in cuts.items() if name in used},
        "waves": [],
    }  # fmt: skip
    for number, wanted in enumerate(waves_of(variants, arguments.processes)):
        say(f"{model}: wave {number + 1}, cut into two at child {cuts['two'][0]}")
        wave: dict[str, Any] = {"failed": {}, "rounds": []}
        result["waves"].append(wave)
        groups = start(wanted, model, cuts, wave["failed"])
        try:
            result["environment"]["torch"] = groups[0].torch
            run_wave(groups, wave, arguments.rounds, arguments.seconds)
        finally:
            for group in groups:
                group.close()
    result["minutes"] = round((time.monotonic() - began) / 60, 1)


def environment() -> dict[str, Any]:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(),
        "pinned_to": sorted(os.sched_getaffinity(0))[:2],
        "python": platform.python_version(), "system": platform.platform(),
        "load_average_before": os.getloadavg()[0],
    }  # fmt: skip


def chosen_variants(pattern: str | None) -> list[Variant]:
    every = all_variants()
    if pattern is None:
        return every
    wanted = pattern.split(",")
    return [
        variant
        for variant in every
        if is_reference(variant) or any(fnmatch.fnmatch(variant.name, p) for p in wanted)
    ]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a block, on one core")
    parser.add_argument("--only", help="names or patterns, comma-separated: 'ddp*,torch-zbv-*'")
    parser.add_argument("--processes", type=int, default=40, help="alive at a time")
    arguments: argparse.Namespace = parser.parse_args()
    return arguments


def main() -> None:
    arguments = read_arguments()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this benchmark pins processes to two cores; only one is available.")
    # A polite end comes as an exception, so that no stopped process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    variants = chosen_variants(arguments.only)
    results: dict[str, Any] = {}
    if arguments.out.exists():  # models that are not run this time keep their results
        results = read_result(arguments.out)
    for model in arguments.models:
        results[model] = {"rounds": arguments.rounds, "lead": LEAD}
        try:
            run_model(model, variants, arguments, results[model])
        finally:  # whatever ended it, what has been measured is kept
            write_result(arguments.out, results, "*.waves.*.rounds.*.*")
        say(f"\n{markdown(model, results[model])}\n")
    say(f"raw results: {arguments.out}")


if __name__ == "__main__":
    main()
