"""A process of one contestant: pinned, built, warmed up, then blocked until its turn.

It reads ``lead steps`` lines from its standard input. For each it trains ``lead + steps`` batches
and answers with the seconds that the last ``steps`` took, and those it was on a core.
"""

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

WARM_UP = 6
"""Enough to fill the deepest pipe (two batches) and for every allocator to settle."""


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the parent is gone, even while it is stopped."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    end_with_parent()
    os.sched_setaffinity(0, job["cores"])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies

    # Imported only now: threads that torch starts inherit the cores of this process.
    import torch
    from benchmarks.two_cores.contestants import make_step
    from benchmarks.two_cores.models import WORKLOADS

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    torch.set_num_threads(job["threads"])
    workload = WORKLOADS[job["model"]]
    try:
        step = make_step(job["kind"], workload, job["cuts"], job["settings"])
        for _ in range(WARM_UP):
            step()
    except Exception as error:
        reply({"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        os._exit(1)
    reply({"ready": torch.__version__})
    for line in sys.stdin:
        lead, steps = map(int, line.split())
        for _ in range(lead):
            step()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [step() for _ in range(steps)]
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        # Give freed memory back: the others need it. The lead steps of the next block fetch it.
        ctypes.CDLL(None).malloc_trim(0)
        reply({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": losses[-1]})
    os._exit(0)  # no goodbyes: the other process may have ended already


if __name__ == "__main__":
    main()
