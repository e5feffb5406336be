"""What every layer and every stage costs on one core, measured in a process of its own.

    python -m benchmarks.two_cores.costs resnet20

prints one line of JSON: forward and backward seconds of every child of the model for each size of
micro-batch, its update, and, for the best few cuts into two, both stages timed whole and alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.two_cores.cuts import Costs, best_two
from benchmarks.two_cores.variants import MICRO_BATCHES

if TYPE_CHECKING:
    from benchmarks.two_cores.models import Workload
    from torch import Tensor, nn

ROUNDS = 7
FINALISTS = 5


def least(times: list[list[float]]) -> list[float]:
    """The least disturbed of several measurements, item by item."""
    return [min(column) for column in zip(*times, strict=True)]


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def child_inputs(workload: "Workload", model: "nn.Sequential", rows: int) -> list["Tensor"]:
    """What every child is given when ``rows`` rows pass through the model."""
    import torch

    x = next(workload.batches())[0][:rows]
    given = []
    with torch.no_grad():
        for index, child in enumerate(model):
            given.append(x.clone().requires_grad_(index > 0))
            x = child(x)
    return given


def child_passes(workload: "Workload", rows: int) -> tuple[list[float], list[float]]:
    """Forward and backward seconds of every child; the last one's include the loss."""
    from benchmarks.two_cores.models import loss

    model = workload.model()
    given = child_inputs(workload, model, rows)
    target = next(workload.batches())[1][:rows]
    forwards, backwards = [], []
    for _ in range(ROUNDS):
        forward, backward = [], []
        for index, child in enumerate(model):
            given[index].grad = None
            if rows == workload.batch:  # a whole batch finds no gradient to add to
                child.zero_grad()
            start = time.perf_counter()
            output = child(given[index])
            if index == len(model) - 1:
                output = loss(output, target)
            middle = time.perf_counter()
            output.backward(None if output.dim() == 0 else output.detach())
            forward.append(middle - start)
            backward.append(time.perf_counter() - middle)
        forwards.append(forward)
        backwards.append(backward)
    return least(forwards), least(backwards)


def child_updates(workload: "Workload") -> list[float]:
    """Seconds of every child's optimizer step."""
    import torch
    from benchmarks.two_cores.models import optimizer

    model = workload.model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found: list[float] = []
    for child in model:
        parameters = list(child.parameters())
        if not parameters:
            found.append(0.0)
            continue
        made = optimizer(parameters)
        made.step()  # the first one makes the momentum
        found.append(min(timed(made.step) for _ in range(ROUNDS)))
    return found


def stage_pairs(workload: "Workload", finalists: list[int]) -> dict[int, list[float]]:
    """Both stages of the best few cuts, each timed whole and alone, one after the other."""
    from benchmarks.two_cores.contestants import stage_alone

    steps = {c: [stage_alone(workload, [c], stage) for stage in (0, 1)] for c in finalists}
    for pair in steps.values():
        for step in pair:
            step()
    times = [[timed(step) for pair in steps.values() for step in pair] for _ in range(ROUNDS)]
    fewest = iter(least(times))
    return {cut: [next(fewest), next(fewest)] for cut in finalists}


def main() -> None:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    import torch
    from benchmarks.two_cores.models import WORKLOADS

    torch.set_num_threads(1)
    workload = WORKLOADS[sys.argv[1]]
    passes = {
        parts: child_passes(workload, workload.batch // parts) for parts in (1, *MICRO_BATCHES)
    }
    costs = Costs(
        forward={parts: forward for parts, (forward, _) in passes.items()},
        backward={parts: backward for parts, (_, backward) in passes.items()},
        update=child_updates(workload),
    )
    answer: dict[str, Any] = {
        "children": len(costs.update),
        "names": [type(child).__name__ for child in workload.model()],
        "parameters": sum(p.numel() for p in workload.model().parameters()),
        "batch": workload.batch,
        "forward_s": costs.forward,
        "backward_s": costs.backward,
        "update_s": costs.update,
        "stage_pairs_s": stage_pairs(workload, best_two(costs)[:FINALISTS]),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
