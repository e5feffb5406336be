"""A process of one version: built, warmed up, then blocked until its turn.

It reads ``lead steps`` lines from its standard input, trains ``lead + steps`` batches for each, and
answers with the seconds of the last ``steps``, by the clock and of the processor.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

WARM_UP = 20


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the parent is gone."""
    ctypes.CDLL(None).prctl(1, 9)


def make_step(name: str) -> Callable[[], Any]:
    """One step of a workload, with the offbeat that this process imports."""
    import torch
    from torch import nn

    import offbeat
    from offbeat.zoo import resnet

    kind, _, rest = name.partition(":")
    if kind == "simulator":
        torch.manual_seed(0)
        method = {
            "synchronous": offbeat.Synchronous(),
            **{rule: offbeat.StaleWeights(backward=rule) for rule in ("stash", "current")},
        }[rest]
        trainer = offbeat.Trainer(
            resnet(20),
            loss=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
            method=method,
            stages=4,
        )
        some = [(torch.randn(128, 3, 32, 32), torch.randint(10, (128,))) for _ in range(8)]
        return partial(_next_step, trainer.step, cycle(some))
    if kind == "small":
        torch.manual_seed(0)
        trainer = offbeat.Trainer(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)),
                nn.Linear(256, 10),
            ),
            loss=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
            method=offbeat.StaleWeights(),
            cuts=[4],
            seed=0,
        )
        few = [(torch.randn(256, 256), torch.randint(10, (256,))) for _ in range(8)]
        return partial(_next_step, trainer.step, cycle(few))
    if kind == "two-cores":
        from benchmarks.two_cores.models import WORKLOADS, loss, optimizer

        workload = WORKLOADS[rest]
        trainer = offbeat.Trainer(
            workload.model(),
            loss=loss,
            optimizer=optimizer,
            method=offbeat.PipeDream(),
            stages=2,
            seed=0,
        )
        return partial(_next_step, trainer.step, workload.batches())
    from benchmarks.one_gpu.workloads import WORKLOADS as ON_GPU

    on_gpu = ON_GPU[rest]
    trainer = offbeat.Trainer(
        on_gpu.made(),
        loss=on_gpu.loss,
        optimizer=on_gpu.optimizer,
        method=offbeat.PipeDream(),
        stages=4,  # cut by counted arithmetic, so that both versions cut alike
        autocast=on_gpu.autocast,
        engine="streams",
    )
    return partial(_next_step, trainer.step, cycle(on_gpu.batches()))


def _next_step(step: Callable[..., Any], batches: Any) -> Any:
    return step(*next(batches))


def main() -> None:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    if "CORE" in os.environ:
        os.sched_setaffinity(0, [int(os.environ["CORE"])])
    import torch

    import offbeat

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step = make_step(sys.argv[1])

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        step()
    wait()
    reply({"ready": torch.__version__, "from": offbeat.__file__})
    for line in sys.stdin:
        lead, steps = map(int, line.split())
        for _ in range(lead):
            step()
        wait()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        wait()
        took = time.perf_counter() - start
        reply({"clock": took, "processor": time.process_time() - used})
    os._exit(0)  # no goodbyes: the other process may have ended already


if __name__ == "__main__":
    main()
