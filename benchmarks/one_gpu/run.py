"""How fast one GPU trains: stages side by side against the four ways people use instead.

Every contestant lives in a process of its own, so that nobody's streams, memory or compiler is in
another's way, and they take turns (A B C A B C ...): while one works the others wait for a word.
Medians over turns. All get the same batches, already on the GPU, the same optimizer, and the same
settings of cuDNN (benchmark mode) and TF32 (on). What compiles is started first, for all workloads.

    python -m benchmarks.one_gpu.run resnet-110-128-fp32 gpt-16x256-8-bf16 --out results.jsonl
"""

import argparse
import gc
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from benchmarks.one_gpu.contestants import Step, eager, graph, streams
from benchmarks.one_gpu.workloads import WORKLOADS
from benchmarks.pool import need

import offbeat
from offbeat.methods import PipeDream, StaleWeights

WARM_UP = 12
TURN_S = 0.25
COMPILED_STAGES = 8


def plain(stages: list[int]) -> dict[str, Callable[..., Step]]:
    made: dict[str, Callable[..., Step]] = {"eager": eager, "graph": graph}
    orders = {"2(K-1-k)": StaleWeights(), "K-1-k": PipeDream(backward="current")}
    for count in stages:
        for lag, method in orders.items():
            made[f"{count} stages, lag {lag}"] = partial(streams, method=method, stages=count)
    return made


def compiled() -> dict[str, Callable[..., Step]]:
    # The default mode launches kernel by kernel as eager does; this one replays CUDA graphs.
    ours = partial(streams, method=PipeDream(), stages=COMPILED_STAGES, compiled=True)
    return {
        "compiled, reduce-overhead": partial(eager, compiled="reduce-overhead"),
        "compiled, graph": partial(graph, compiled=True),
        f"{COMPILED_STAGES} stages, lag K-1-k, stash, compiled": ours,
    }


class Contestant:
    """A process that has built its network or is about to, and takes turns when asked."""

    def __init__(self, workload: str, make: Callable[..., Step], warm_up: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, there = context.Pipe()
        settings = (workload, make, warm_up, there)
        self._process = context.Process(target=_compete, args=settings, daemon=True)
        self._process.start()
        there.close()
        self._row: dict[str, Any] | None = None

    @property
    def row(self) -> dict[str, Any]:
        """What building took, once it is built; "error" if it could not be."""
        if self._row is None:
            try:
                self._row = self._link.recv()
            except EOFError:
                self._row = {"error": "the process died"}
        return self._row

    def turn(self, steps: int) -> float:
        """Milliseconds a step."""
        self._link.send(steps)
        return float(self._link.recv())

    def leave(self) -> None:
        self._process.kill()
        self._process.join()


def _compete(name: str, make: Callable[..., Step], warm_up: int, link: Connection) -> None:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    workload = WORKLOADS[name]
    batches = workload.batches()
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = make(workload)
            for number in range(warm_up):
                step(*batches[number % len(batches)])
            torch.cuda.synchronize()
    except Exception as error:  # a contestant that cannot run is a result, too
        link.send({"error": f"{type(error).__name__}: {error}"})
        return
    seconds = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _turn(step, batches, 10)
    said = sorted({str(w.message) for w in caught if "offbeat" in str(w.filename)})
    memory = torch.cuda.max_memory_reserved() / 2**20
    # Stages are cut by time, which others may have been taking then.
    cuts = getattr(getattr(step, "__self__", None), "cuts", None)
    row = {"warm_up_s": seconds, "memory_mib": memory, "messages": said}
    link.send(row if cuts is None else row | {"cuts": list(cuts)})
    while True:
        link.send(_turn(step, batches, link.recv()))


def _turn(step: Step, batches: Any, steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(steps):
        step(*batches[number % len(batches)])
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def compete(contestants: dict[str, Contestant], turns: int) -> dict[str, dict[str, Any]]:
    rows = {name: contestant.row for name, contestant in contestants.items()}
    able = {name: one for name, one in contestants.items() if "error" not in rows[name]}
    steps = {name: max(5, int(TURN_S * 1e3 / one.turn(10))) for name, one in able.items()}
    times: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(turns):
        for name, contestant in able.items():
            times[name].append(contestant.turn(steps[name]))
    for name, found in times.items():
        low, _, high = quantiles(found, n=4)
        rows[name] |= {"ms": median(found), "quartiles": [low, high], "turns": found}
    return rows


def result_of(workload: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is stored of a contest: its rows, and where they were measured."""
    return {
        "workload": workload,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed on one GPU.")
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--no-compiled", action="store_true", help="leave out what compiles")
    parser.add_argument(
        "--one-by-one", nargs="+", choices=list(WORKLOADS), default=[],
        help="workloads that need much memory: build what does not compile one after the other",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), help="appended to")
    arguments = parser.parse_args()
    need("cuda")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    # A stage records a slot for every batch in flight, the last one after 2K steps or so.
    warm_up = WARM_UP + 4 * max(arguments.stages)
    slow: dict[str, dict[str, Contestant]] = {
        workload: {}
        if arguments.no_compiled
        else {name: Contestant(workload, make, warm_up) for name, make in compiled().items()}
        for workload in arguments.workloads
    }
    for workload, contestants in slow.items():
        for name, contestant in contestants.items():
            print(workload, name, contestant.row, flush=True)
    for workload, contestants in slow.items():
        for name, make in plain(arguments.stages).items():
            contestants[name] = Contestant(workload, make, warm_up)
            if workload in arguments.one_by_one:
                print(workload, name, contestants[name].row, flush=True)
        rows = compete(contestants, arguments.turns)
        for contestant in contestants.values():
            contestant.leave()
        with arguments.out.open("a") as file:
            file.write(json.dumps(result_of(workload, rows)) + "\n")
        base = rows["graph"].get("ms", float("nan"))
        for name, row in rows.items():
            said = row.get("error") or f"{row['ms']:8.3f} ms {base / row['ms']:6.2f} of graph"
            print(f"{workload:36} {name:38} {said}", flush=True)


if __name__ == "__main__":
    main()
