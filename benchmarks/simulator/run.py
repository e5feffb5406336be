"""What it costs to simulate staleness in one process, and what it holds in memory.

ResNet-20 for 32x32 images, batch 128, four stages, SGD with momentum, random images (their values
do not change the work). Every round times the plain PyTorch loop and each backward rule one after
the other, a few steps each; what is reported is the median over rounds of the ratio to the plain
loop of the same round, so that a busy machine slows both sides alike.

    python benchmarks/simulator/run.py --out benchmarks/simulator/results.json
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat.methods import RULES, Synchronous
from offbeat.zoo import resnet

STAGES, BATCH = 4, 128
LIMITS = {"current": 1.05, "stash": 1.05, "recompute": 1.40}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-4)


def plain_stepper(batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    torch.manual_seed(0)
    model = resnet(20)
    made = optimizer(model.parameters())

    def step() -> None:
        x, y = next(batches)
        made.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        made.step()

    return step


def trainer_for(method: offbeat.StaleWeights | Synchronous) -> offbeat.Trainer:
    torch.manual_seed(0)
    return offbeat.Trainer(
        resnet(20),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        method=method,
        stages=STAGES,
    )


def time_rounds(steppers: dict[str, Callable[[], object]], rounds: int, steps: int) -> list[Any]:
    found = []
    for number in range(rounds):
        names = list(steppers)
        names = names[number % len(names) :] + names[: number % len(names)]  # no fixed order
        seconds = {}
        for name in names:
            start = time.perf_counter()
            for _ in range(steps):
                steppers[name]()
            seconds[name] = (time.perf_counter() - start) / steps
        found.append({name: seconds[name] for name in steppers})
        print(f"round {number + 1}: " + "  ".join(f"{n} {s:.3f} s" for n, s in found[-1].items()))
    return found


def saved_bytes(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Bytes one graph of a module keeps beside its weights, counted without the library."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(x)
    return sum(seen.values()), output.detach().requires_grad_()


def memory_against_formulas(trainers: dict[str, offbeat.Trainer], x: Tensor) -> dict[str, Any]:
    """Bytes held between two steps beside lag x (graph or input) bytes, stage by stage."""
    cuts = trainers["stash"].cuts
    assert cuts is not None
    ends = [0, *cuts, len(resnet(20))]
    model = resnet(20)
    graph_bytes, input_bytes, value = [], [], x
    for start, end in pairwise(ends):
        input_bytes.append(value.untyped_storage().nbytes())
        size, value = saved_bytes(model[start:end], value)
        graph_bytes.append(size)
    report: dict[str, Any] = {}
    for rule, trainer in trainers.items():
        each = input_bytes if rule == "recompute" else graph_bytes
        memory = trainer.memory()
        report[rule] = {
            "in_flight_bytes": [m.in_flight_bytes for m in memory],
            "formula_lag_x_bytes": [
                lag * size for lag, size in zip(trainer.lags, each, strict=True)
            ],
            "held": [m.graphs + m.inputs for m in memory],
            "peak_held": [m.peak_in_flight for m in memory],
            "weight_copies": [m.weight_copies for m in memory],
            "weight_bytes": [m.weight_bytes for m in memory],
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    some = [
        (
            torch.randn(BATCH, 3, 32, 32, generator=generator),
            torch.randint(10, (BATCH,), generator=generator),
        )
        for _ in range(2 * STAGES)  # more than are ever in flight, so that none is counted twice
    ]
    batches = cycle(some)
    trainers: dict[str, offbeat.Trainer] = {
        rule: trainer_for(offbeat.StaleWeights(backward=rule)) for rule in RULES
    }

    def stepper(trainer: offbeat.Trainer) -> Callable[[], object]:
        return lambda: trainer.step(*next(batches))

    steppers: dict[str, Callable[[], object]] = {"plain": plain_stepper(batches)}
    steppers["synchronous"] = stepper(trainer_for(Synchronous()))
    steppers |= {rule: stepper(trainer) for rule, trainer in trainers.items()}
    for _ in range(2 * STAGES):  # fill the pipes: only full ones do a batch's whole work per step
        for trainer in trainers.values():
            trainer.step(*next(batches))
    time_rounds(steppers, 1, 1)
    rounds = time_rounds(steppers, arguments.rounds, arguments.steps)
    ratios = {
        name: statistics.median(r[name] / r["plain"] for r in rounds)
        for name in steppers
        if name != "plain"
    }
    result = {
        "setting": {
            "model": "resnet20", "batch": BATCH, "stages": STAGES, "cuts": trainers["stash"].cuts,
            "steps_per_block": arguments.steps, "rounds": arguments.rounds,
        },
        "environment": {
            "torch": torch.__version__, "threads": torch.get_num_threads(),
            "python": platform.python_version(), "machine": platform.processor(),
        },
        "median_ratio_to_plain_loop": ratios,
        "limits": LIMITS,
        "memory": memory_against_formulas(trainers, some[0][0]),
        "seconds_per_step": rounds,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, ratio in ratios.items():
        limit = f"(limit {LIMITS[name]:.2f})" if name in LIMITS else ""
        print(f"{name:12} {ratio:.3f} x plain loop {limit}")
    print(f"raw results: {arguments.out}")


if __name__ == "__main__":
    main()
