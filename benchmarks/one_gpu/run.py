"""How fast one GPU trains: stages side by side against the four ways people use instead.

All contestants of a workload live in one process and take turns (A B C A B C ...); the table has
medians over turns. Every contestant gets the same batches, already on the GPU, the same optimizer
and the same settings of cuDNN (benchmark mode) and TF32 (on).

    python -m benchmarks.one_gpu.run resnet-110-128-fp32 --stages 4 8 --out results.jsonl
"""

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from benchmarks.one_gpu.contestants import Step, eager, graph, streams
from benchmarks.one_gpu.workloads import WORKLOADS, Workload

import offbeat
from offbeat.methods import PipeDream, StaleWeights

WARM_UP = 12
TURN_S = 0.2


def contestants(
    workload: Workload, stages: list[int], compiled: bool
) -> dict[str, Callable[[], Step]]:
    made: dict[str, Callable[[], Step]] = {
        "eager": partial(eager, workload),
        "graph": partial(graph, workload),
    }
    orders = {"2(K-1-k)": StaleWeights(), "K-1-k": PipeDream(backward="current")}
    for count in stages:
        for lag, method in orders.items():
            made[f"{count} stages, lag {lag}"] = partial(streams, workload, method, count)
    if compiled:
        # The default mode launches kernel by kernel as eager does; this one replays CUDA graphs.
        made["compiled, reduce-overhead"] = partial(eager, workload, compiled="reduce-overhead")
        made["compiled, graph"] = partial(graph, workload, compiled=True)
        for count in stages:
            name = f"{count} stages, lag K-1-k, stash, compiled"
            made[name] = partial(streams, workload, PipeDream(), count, compiled=True)
    return made


def turn(step: Step, batches: Any, steps: int) -> float:
    """Milliseconds a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(steps):
        step(*batches[number % len(batches)])
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def built(make: Callable[[], Step], batches: Any, warm_up: int) -> tuple[Step, dict[str, Any]]:
    """A contestant that has warmed up, and what that took."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = make()
        for number in range(warm_up):
            step(*batches[number % len(batches)])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    said = sorted({str(w.message) for w in caught if "offbeat" in str(w.filename)})
    return step, {"warm_up_s": seconds, "memory_mib": held / 2**20, "messages": said}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed on one GPU.")
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--compiled", action="store_true", help="with the contestants that compile")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    workload = WORKLOADS[arguments.workload]
    batches = workload.batches()
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, make in contestants(workload, arguments.stages, arguments.compiled).items():
        try:
            # A stage records a slot for every batch in flight, the last one after 2K steps or so.
            steps[name], rows[name] = built(make, batches, WARM_UP + 4 * max(arguments.stages))
        except Exception as error:  # a contestant that cannot run is a result, too
            rows[name] = {"error": f"{type(error).__name__}: {error}"}
        print(name, rows[name], flush=True)
    counts = {name: max(5, int(TURN_S * 1e3 / turn(s, batches, 10))) for name, s in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.turns):
        for name, step in steps.items():
            times[name].append(turn(step, batches, counts[name]))
    for name, found in times.items():
        low, _, high = quantiles(found, n=4)
        rows[name] |= {"ms": median(found), "quartiles": [low, high], "turns": found}
    result = {
        "workload": workload.name,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
        "rows": rows,
    }
    with arguments.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    base = rows["graph"]["ms"]
    for name, row in rows.items():
        if "ms" in row:
            print(f"{name:45} {row['ms']:8.3f} ms {base / row['ms']:6.2f} of graph", flush=True)


if __name__ == "__main__":
    main()
