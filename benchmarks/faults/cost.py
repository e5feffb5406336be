"""What saving every 50 steps costs: time with over time without, and bytes.

ResNet-20 for 32x32 images, batch 128, four stages, SGD with momentum, random images, one process.
Every round runs, rule by rule, a block of 50 steps without saving and one with an exact checkpoint,
saved at the start of the block and written meanwhile; the order of the two alternates. A block ends
when both its steps and its checkpoint are done, so nothing is hidden in the next block.

A shared machine stalls for seconds at a time, more than a checkpoint costs. So steps are compared
one by one: the n-th step of a block with a checkpoint over the median step of the block without
that it is paired with; of these the median over all rounds, and of the fifty medians the mean. A
stall falls on some steps of some rounds and moves no median; a checkpoint falls on the same steps
of every round. The plain ratio of the blocks is stored beside it.

    python -m benchmarks.faults.cost --out benchmarks/faults/cost.jsonl

On a machine that others use, ``--processor`` compares processor time instead: of checkpoints, and
of steps, counted up to 50.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.stored import write_result
from torch import nn

import offbeat
from offbeat.methods import RULES
from offbeat.zoo import resnet

STAGES, BATCH, EVERY = 4, 128, 50
LIMITS = {"current": 1.10, "stash": 1.10, "recompute": 1.03}


def trainer_for(rule: Any) -> offbeat.Trainer:
    torch.manual_seed(0)
    return offbeat.Trainer(
        resnet(20),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        method=offbeat.StaleWeights(backward=rule),
        stages=STAGES,
    )


def block(trainer: offbeat.Trainer, batches: Any, folder: Path | None) -> dict[str, Any]:
    """Some steps, with a checkpoint or without."""
    start, worked = time.perf_counter(), time.process_time()
    taken_s = 0.0
    if folder is not None:
        trainer.save(folder, keep=1)
        taken_s = time.perf_counter() - start
    ends = [start]
    for _ in range(EVERY):
        trainer.step(*next(batches))
        ends.append(time.perf_counter())
    trainer.finish_saving()  # the last step's, if it is still being written
    ends[-1] = time.perf_counter()
    return {
        "taken_s": taken_s,
        "block_s": ends[-1] - start,
        "steps_s": [round(end - begin, 4) for begin, end in pairwise(ends)],
        "cpu_s": time.process_time() - worked,
    }


def filled(rule: Any, batches: Any, folder: Path) -> tuple[offbeat.Trainer, Any, Path]:
    """A trainer with a full pipe that has saved once: the first time its graphs are inspected."""
    trainer = trainer_for(rule)
    for _ in range(8):
        trainer.step(*next(batches))
    trainer.save(folder, keep=1, wait=True)
    return trainer, batches, folder


def processor_time(data: Any, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds of processor time, all threads together: one checkpoint, and 50 steps."""
    rows = []
    for rule in RULES:
        trainer, batches, place = filled(rule, cycle(data), folder / rule)
        for number in range(rounds):
            began = time.process_time()
            for _ in range(5):
                trainer.step(*next(batches))
            stepped = time.process_time()
            trainer.save(place, keep=1, wait=True)
            row = {
                "rule": rule,
                "round": number,
                "cpu_50_steps_s": 10 * (stepped - began),
                "cpu_checkpoint_s": time.process_time() - stepped,
                "bytes": size_of(place),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rules", nargs="+", choices=RULES, help="by default all")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(BATCH, 3, 32, 32, generator=generator),
            torch.randint(10, (BATCH,), generator=generator),
        )
        for _ in range(16)
    ]
    if given.processor:
        with tempfile.TemporaryDirectory() as name:
            measured = processor_time(data, Path(name), given.rounds)
        store(given.out, {"rounds": measured})
        return
    rows: list[dict[str, Any]] = []
    rules = given.rules or RULES
    with tempfile.TemporaryDirectory() as name:
        trainers = {rule: filled(rule, cycle(data), Path(name) / rule) for rule in rules}
        for number in range(given.rounds):
            for rule, (trainer, batches, folder) in trainers.items():
                order = [None, folder] if number % 2 == 0 else [folder, None]
                blocks = {place: block(trainer, batches, place) for place in order}
                row = {
                    "rule": rule,
                    "round": number,
                    "without_s": blocks[None]["block_s"],
                    "with_s": blocks[folder]["block_s"],
                    "steps_without_s": blocks[None]["steps_s"],
                    "steps_with_s": blocks[folder]["steps_s"],
                    "cpu_without_s": blocks[None]["cpu_s"],
                    "cpu_with_s": blocks[folder]["cpu_s"],
                    "taken_s": blocks[folder]["taken_s"],
                    "bytes": size_of(folder),
                }
                rows.append(row)
                print(rule, number, row["without_s"], row["with_s"], flush=True)
    summary = {}
    for rule in rules:
        of_rule = [row for row in rows if row["rule"] == rule]
        ratios = [row["with_s"] / row["without_s"] for row in of_rule]
        by_step = [
            statistics.median(
                row["steps_with_s"][n] / statistics.median(row["steps_without_s"])
                for row in of_rule
            )
            for n in range(EVERY)
        ]
        cpu = [row["cpu_with_s"] / row["cpu_without_s"] for row in of_rule]
        low, _, high = statistics.quantiles(ratios, n=4)
        summary[rule] = {
            "ratio_by_steps": statistics.fmean(by_step),
            "limit": LIMITS[rule],
            "median_ratio_of_blocks": statistics.median(ratios),
            "quartiles_of_blocks": [low, high],
            "median_cpu_ratio": statistics.median(cpu),
            "bytes": max(row["bytes"] for row in of_rule),
            "median_taken_s": statistics.median(row["taken_s"] for row in of_rule),
        }
    print(json.dumps(summary, indent=1))
    store(given.out, {"summary": summary, "rounds": rows})


def store(out: Path | None, results: dict[str, Any]) -> None:
    if out is None:
        return
    setting = {
        "network": "ResNet-20",
        "batch": BATCH,
        "stages": STAGES,
        "every": EVERY,
    }
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    found = {"setting": setting, "environment": environment, **results}
    write_result(out, found, "rounds.*")


if __name__ == "__main__":
    main()
