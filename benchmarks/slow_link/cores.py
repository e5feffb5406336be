"""Throughput over replicas on one machine: one process and one core each, no limit on the link.

    PYTHONPATH=src:. python3 benchmarks/slow_link/cores.py --out cores.json

DaSGD and DDP beside replicas that do not talk to each other, in turns within a round.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from benchmarks.slow_link.contestants import (
    ALONE,
    DDP,
    EVERY,
    KEEP_MEMORY,
    Spec,
    Work,
    build,
    da_sgd,
)
from benchmarks.slow_link.summary import cores_table

import offbeat

CONTESTANTS: tuple[Spec, ...] = (ALONE, DDP, da_sgd(1), da_sgd(2))
LEAD = EVERY


def cores_in_order() -> list[int]:
    """The cores we may use; second threads of a core come after all first ones."""
    mine = sorted(os.sched_getaffinity(0))
    ranked = []
    for core in mine:
        siblings = [core]
        with suppress(OSError):
            text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
            siblings = _numbers(text.read_text())
        ranked.append((sum(other < core for other in siblings if other in mine), core))
    return [core for _, core in sorted(ranked)]


def _numbers(text: str) -> list[int]:
    """``0,16`` or ``0-1`` as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def pin(core: int) -> None:
    """All threads: torch and gloo have started some already."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def time_rounds(work: Work, cores: list[int], rounds: int, steps: int) -> dict[str, list[float]]:
    """In every process: mean seconds per step, per contestant and round."""
    together = dist.is_initialized()
    pin(cores[dist.get_rank() if together else 0])
    specs = CONTESTANTS if together else (ALONE,)
    contestants = [build(spec, work) for spec in specs]
    for contestant in contestants:
        for _ in range(LEAD):
            contestant.step()
        contestant.settle()
    gc.collect()
    gc.freeze()
    found: dict[str, list[float]] = {spec.name: [] for spec in specs}
    for number in range(rounds):
        shift = number % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            if together:
                dist.barrier()
            for _ in range(LEAD):
                contestant.step()
            start = time.perf_counter()
            for _ in range(steps):
                contestant.step()
            found[contestant.spec.name].append((time.perf_counter() - start) / steps)
            contestant.settle()
    return found


def measure(work: Work, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every number of replicas once per pass; another pass only while there is time for it."""
    os.environ.update(KEEP_MEMORY)  # of the processes to come
    began, rows = time.monotonic(), []
    cores = cores_in_order()
    for number in range(arguments.passes):
        started = time.monotonic()
        for replicas in arguments.replicas:
            if replicas > len(cores):
                print(f"{replicas} replicas need as many cores; there are {len(cores)}")
                continue
            found = offbeat.launch(
                time_rounds, replicas, work, cores, arguments.rounds, arguments.steps
            )
            # The slowest replica counts: the others would wait for it in the end.
            slowest = {
                name: [max(process[name][r] for process in found) for r in range(arguments.rounds)]
                for name in found[0]
            }
            rows.append({"pass": number, "replicas": replicas, "step_s": slowest})
            words = ", ".join(f"{n} {1000 * median(t):.1f}" for n, t in slowest.items())
            print(f"pass {number + 1}, {replicas} replicas, ms a step: {words}", flush=True)
        last = time.monotonic() - started
        if time.monotonic() - began + last > arguments.seconds:
            break
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per number of replicas and contestant: times replicas alone, and times one replica."""
    one = median(s for row in rows if row["replicas"] == 1 for s in row["step_s"][ALONE.name])
    found = []
    for replicas in dict.fromkeys(row["replicas"] for row in rows):
        mine = [row["step_s"] for row in rows if row["replicas"] == replicas]
        for name in mine[0]:
            ratios = [
                t / alone
                for times in mine
                for t, alone in zip(times[name], times[ALONE.name], strict=True)
            ]
            seconds = median(t for times in mine for t in times[name])
            found.append(
                {
                    "replicas": replicas,
                    "name": name,
                    "step_ms": 1000 * seconds,
                    "step_over_alone": median(ratios),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "throughput_over_one": replicas * one / seconds,
                }
            )
    return found


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "cores.json")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed in a turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1200, help="of a replica's batch")
    parser.add_argument("--seconds", type=float, default=130.0, help="no pass begun beyond that")
    parser.add_argument("--table", action="store_true", help="print the table of a stored result")
    arguments = parser.parse_args()
    if arguments.steps % EVERY:
        parser.error(f"--steps: whole rounds are timed, so give a multiple of {EVERY}")
    if 1 not in arguments.replicas:
        parser.error("--replicas: 1 is the unit of the throughput; include it")
    return arguments


def main() -> None:
    arguments = arguments_of()
    if arguments.table:
        print(cores_table(json.loads(arguments.out.read_text())))
        return
    work = Work(
        compute="real",
        width=arguments.width,
        layers=arguments.layers,
        rows=arguments.rows,
        sleep_s=0.0,
    )
    began = time.monotonic()
    rows = measure(work, arguments)
    result = {
        "setting": {
            "work": asdict(work),
            "parameter_bytes": 4 * work.parameters,
            "contestants": {spec.name: repr(spec.averaging or spec.kind) for spec in CONTESTANTS},
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "cores": cores_in_order(),
            "duration_s": round(time.monotonic() - began, 1),
        },
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_average_after": os.getloadavg()[0],
        },
        "summary": summary(rows),
        "runs": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(cores_table(result))
    print(f"raw results: {arguments.out}")


if __name__ == "__main__":
    main()
