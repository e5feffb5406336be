"""How much longer a step takes when stages are slowed at random, method by method.

Every (stage, step) is slowed with probability 1/3 by 20, 50, 100 or 150 %. Four processes, one
stage each; a stage sleeps for as long as it pretends to compute, or computes for real.

    python benchmarks/stragglers/run.py --out benchmarks/stragglers/results.jsonl
    python benchmarks/stragglers/run.py --compute real
    python benchmarks/stragglers/run.py --table
"""

import argparse
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from benchmarks.stored import read_result, write_result
from benchmarks.stragglers import model
from benchmarks.stragglers.job import Run, Work, time_all
from benchmarks.stragglers.summary import table

import offbeat
from offbeat.methods import ADL, DSP, FeaturesReplay, GPipe, Method, Synchronous

STAGES, PROBABILITY = 4, 1 / 3
SLOWDOWNS = (0.2, 0.5, 1.0, 1.5)
METHODS: dict[str, Method] = {
    "Synchronous": Synchronous(),
    "GPipe": GPipe(micro_batches=4),
    "FeaturesReplay": FeaturesReplay(),
    "ADL M=4": ADL(accumulate=4),
    "ADL M=1": ADL(accumulate=1),
    "DSP hop 1": DSP(hop=1),
    "DSP hop 2": DSP(hop=2),
    "DSP hop 3": DSP(hop=3),
}


def plan_runs(name: str, seed: int, steps: int) -> list[Run]:
    """A method without faults, then slowed: neighbours in time are compared with each other."""
    method = METHODS[name]
    # Without lag a step begins where the last one ended, and few of them tell as much.
    timed = steps if any(method.lags(STAGES)) else max(1, steps // 3)
    return [
        Run(
            name=name,
            method=method,
            by=by,
            probability=PROBABILITY,
            seed=seed,
            first=2 + 2 * method.schedule(STAGES).fill_steps,
            steps=timed if by else min(timed, max(1, steps // 2)),
        )
        for by in (0.0, *SLOWDOWNS)
    ]


def measure(work: Work, setting: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of processes per method and seed, ``parallel`` seeds at a time."""

    def one(name: str, seed: int) -> list[dict[str, Any]]:
        runs = plan_runs(name, seed, setting.steps)
        (measured, *_) = offbeat.launch(time_all, STAGES, STAGES, work, runs)
        return [
            {
                "method": name,
                "slowdown": run.by,
                "seed": seed,
                "first": run.first,
                "steps": run.steps,
                **times,
            }
            for run, times in zip(runs, measured, strict=True)
        ]

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(setting.parallel) as pool:
        for name in METHODS:
            for found in pool.map(one, [name] * setting.seeds, range(setting.seeds)):
                rows += found
    return rows


def with_increases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each slowed run its increase, measured and by the model with the same draws."""
    plain = {(r["method"], r["seed"]): r["step_s"] for r in rows if not r["slowdown"]}
    for row in rows:
        if by := row["slowdown"]:
            ratio = row["step_s"] / plain[row["method"], row["seed"]]
            faults = offbeat.Faults().slow(by=by, probability=PROBABILITY, seed=row["seed"])
            row["increase_percent"] = 100 * (ratio - 1)
            row["model_percent"] = model.increase(
                METHODS[row["method"]], STAGES, faults, first=row["first"], steps=row["steps"]
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per method and slow-down: mean and spread over seeds, beside the models and the floor."""
    found = []
    for name, method in METHODS.items():
        mine = [row for row in rows if row["method"] == name]
        for by in SLOWDOWNS:
            slowed = [row for row in mine if row["slowdown"] == by]
            values = [row["increase_percent"] for row in slowed]
            found.append(
                {
                    "method": name,
                    "slowdown": by,
                    "plain_step_s": fmean(r["step_s"] for r in mine if not r["slowdown"]),
                    "plain_step_model_forwards": model.plain_step_time(method, STAGES),
                    "increase_percent": fmean(values),
                    "lowest_percent": min(values),
                    "highest_percent": max(values),
                    "model_percent": fmean(row["model_percent"] for row in slowed),
                    "model_long_run_percent": model.long_run_increase(
                        method, STAGES, by=by, probability=PROBABILITY
                    ),
                    "floor_percent": 100 * PROBABILITY * by,
                }
            )
    return found


def barrier_model() -> dict[str, Any]:
    """Features Replay as published, with its barrier after every step: model only."""
    method = METHODS["FeaturesReplay"]
    return {
        "plain_step_forwards": model.plain_step_time(method, STAGES, barrier=True),
        "long_run_percent": {
            f"{by:.0%}": model.long_run_increase(
                method, STAGES, by=by, probability=PROBABILITY, barrier=True
            )
            for by in SLOWDOWNS
        },
    }


def environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="results to write (--table: read)")
    parser.add_argument("--compute", choices=["sleep", "real"], default="sleep")
    parser.add_argument("--steps", type=int, default=120, help="timed steps of a slowed run")
    parser.add_argument("--seeds", type=int, default=3, help="fault seeds 0, 1, ...")
    parser.add_argument("--parallel", type=int, default=None, help="seeds measured side by side")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="sleeping: one forward")
    parser.add_argument("--layers", type=int, default=12, help="real: linear layers per stage")
    parser.add_argument("--table", action="store_true", help="print the table of a stored result")
    arguments = parser.parse_args()
    sleeps = arguments.compute == "sleep"
    if arguments.out is None:
        name = "results.jsonl" if sleeps else "results-real.jsonl"
        arguments.out = Path(__file__).parent / name
    if arguments.parallel is None:
        # Sleeping processes share cores; computing ones need one each.
        room = arguments.seeds if sleeps else max(1, (os.cpu_count() or 1) // STAGES)
        arguments.parallel = min(arguments.seeds, room)
    return arguments


def work_of(arguments: argparse.Namespace) -> Work:
    if arguments.compute == "sleep":
        return Work(
            compute="sleep", rows=16, width=8, layers=1, forward_s=arguments.forward_ms / 1000
        )
    return Work(compute="real", rows=256, width=256, layers=arguments.layers, forward_s=0.0)


def main() -> None:
    arguments = arguments_of()
    if arguments.table:
        print(table(read_result(arguments.out)))
        return
    work, start = work_of(arguments), time.perf_counter()
    before = environment()
    print(f"{work}\n{before}\n{arguments}", flush=True)
    rows = measure(work, arguments)
    duration_s = round(time.perf_counter() - start, 1)
    write_result(arguments.out, {"runs": rows}, "runs.*")  # the models below take a minute
    rows = with_increases(rows)
    result = {
        "setting": {
            "stages": STAGES,
            "probability": PROBABILITY,
            "work": vars(work),
            "methods": {name: repr(method) for name, method in METHODS.items()},
            "seeds": arguments.seeds,
            "parallel": arguments.parallel,
            "duration_s": duration_s,
        },
        "environment": before,
        "summary": summary(rows),
        "features_replay_with_barrier": barrier_model(),
        "runs": rows,
    }
    write_result(arguments.out, result, "summary.*", "runs.*")
    print(table(result))
    print(f"raw results: {arguments.out}")


if __name__ == "__main__":
    main()
