"""Processes that share a device and are handed one run after the other.

Small networks leave most of a GPU idle; under NVIDIA's multi-process service (mps.py) the
kernels of many runs work side by side.
"""

import _thread
import gc
import json
import multiprocessing
import os
import platform
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from benchmarks.stored import Row

import offbeat

MARGIN_S = 8.0
"""Of a limit, kept for what is under way to end by itself."""
LONGEST_WARNING = 300
"""Characters that are stored; "out of memory" lists every process of the GPU."""
Run = Callable[[Any], Row | None]
"""Trains one job; None if it could not end in time."""


def need(device: str, data: Path | None = None, *, instead: str = "") -> None:
    """Ends a command in words where it could not begin."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"PyTorch {torch.__version__} finds no NVIDIA GPU. {instead}".strip())
    if data is not None and not data.is_dir():
        raise SystemExit(
            f"--data {data}: no such folder. The benchmark's README says how to get it."
        )


def _work(prepare: Callable[[float], Run], link: Connection, until: float) -> None:
    torch.set_num_threads(1)
    # What a shell starts in the background ignores interrupts, the one below included.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        run = prepare(until)
        link.send(None)
        while (job := link.recv()) is not None:
            try:
                link.send(run(job))
            except Exception as error:
                traceback.print_exc()
                link.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        # Who leaves the multi-process service with work in its queue takes all others along.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _stop_with_parent() -> None:
    """Else a command that was killed would leave its runs behind, training for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _thread.interrupt_main()


def cleared_up(run: Callable[[], Row | None], device: torch.device) -> Row | None:
    """What a run found, with the warnings it gave; its recordings' memory is free afterwards."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = run()
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    words = sorted({str(warning.message)[:LONGEST_WARNING] for warning in said})
    return None if found is None else found | {"warnings": words}


def memory_gib(device: torch.device) -> float | None:
    """The most that was reserved since this was asked last."""
    if device.type != "cuda":
        return None
    reserved = torch.cuda.max_memory_reserved() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return round(reserved, 2)


class Store:
    """Appends every run as it ends, with where it ran, and prints a line of it."""

    def __init__(self, arguments: Any, served: bool, line: Callable[[Row], str]) -> None:
        """``arguments`` have ``out``, ``parallel`` and ``device``; ``served``: by MPS."""
        self._out: Path = arguments.out
        self._line = line
        self._start = time.monotonic()
        self._where = {
            "torch": torch.__version__,
            "offbeat": offbeat.__version__,
            "python": platform.python_version(),
            "parallel": arguments.parallel,
            "mps": served,
            "device": arguments.device,
        }

    def __call__(self, job: Any, found: Row) -> None:
        row = asdict(job) | found | self._where
        with self._out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - self._start:6.1f} s  {self._line(row)}", flush=True)


def first_that_fits(wanted: Iterable[float], at_work: Sequence[float], most: float) -> int | None:
    """The place of the first that fits beside those at work; with none at work anything does."""
    for place, need in enumerate(wanted):
        if not at_work or need + sum(at_work) <= most:
            return place
    return None


class Pool:
    """Processes that wait for jobs; what they find is handed to ``store`` as it comes.

    ``prepare``  called in every process with the time at which runs must have ended; loads the data
                 and returns what runs a job.
    ``limit_s``  after so many seconds no job is handed out any more, and none is waited for.
    ``needs``    what a job takes of something that all share, such as GiB of memory; those at work
                 take at most ``most`` together, unless one alone takes more.
    """

    def __init__(
        self,
        prepare: Callable[[float], Run],
        store: Callable[[Any, Row], None],
        *,
        parallel: int,
        limit_s: float,
        needs: Callable[[Any], float] = lambda _: 0.0,
        most: float = 0.0,
    ) -> None:
        self._store = store
        self._needs = needs
        self._most = most
        self._until = time.monotonic() + limit_s - MARGIN_S
        self._idle: list[Connection] = []
        self._busy: dict[Connection, Any] = {}
        # Read by the libraries that the processes load.
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        context = multiprocessing.get_context("spawn")
        self._processes = []
        for _ in range(parallel):
            here, there = context.Pipe()
            settings = (prepare, there, self._until)
            process = context.Process(target=_work, args=settings, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._busy[here] = None  # until it says that it is ready

    def finish(self, jobs: list[Any]) -> None:
        """Hands out jobs until none is left and all have ended, or the time is up."""
        left = list(jobs)
        while True:
            while self._idle and time.monotonic() < self._until:
                at_work = [self._needs(job) for job in self._busy.values() if job is not None]
                place = first_that_fits(map(self._needs, left), at_work, self._most)
                if place is None:
                    break
                link = self._idle.pop()
                self._busy[link] = left.pop(place)
                link.send(self._busy[link])
            if not self._busy or (not left and not any(self._busy.values())):
                break
            ready = wait(list(self._busy), max(0.0, self._until + 5.0 - time.monotonic()))
            if not ready:
                break
            for answering in ready:
                assert isinstance(answering, Connection)
                self._take(answering)
        if left:
            print(f"{len(left)} jobs were not started", flush=True)

    def _take(self, link: Connection) -> None:
        job = self._busy.pop(link)
        try:
            found = link.recv()
        except (EOFError, OSError):  # the process has died, and its job with it
            print("a process died with", job, flush=True)
            return
        self._idle.append(link)
        if job is not None and found is not None:
            self._store(job, found)

    def close(self) -> None:
        for link in self._idle:
            link.send(None)
        for process in self._processes:
            process.join(1.0)
            process.kill()
