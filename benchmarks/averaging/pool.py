"""Processes that stay alive and are handed one run after the other."""

import multiprocessing
import os
import platform
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

from benchmarks.averaging.training import Job

Kind = Literal["probe", "run"]
Reply = dict[str, Any]
GRACE_S = 8.0
"""Time to stop by itself; a process killed inside a kernel can upset the others' MPS."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the data is and where a process trains."""

    data: Path
    rows: int
    test_rows: int
    device: str


def work(place: Place, link: Connection, stop: Event) -> None:
    """What each process does until there is nothing left."""
    import torch
    from benchmarks.averaging.data import Cifar
    from benchmarks.averaging.training import Stopped, forget, time_steps, train

    torch.set_num_threads(1)
    device = torch.device(place.device)
    data = Cifar(place.data, device, rows=place.rows, test_rows=place.test_rows)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    link.send({"device": name})
    while (order := link.recv()) is not None:
        kind, job = order
        try:
            if kind == "probe":
                link.send(time_steps(job, data, device))
            else:
                link.send(train(job, data, device, stop.is_set))
        except Stopped:
            break
        except Exception as error:
            traceback.print_exc()
            link.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        try:
            forget(device)
            torch.zeros(1, device=device).item()
        except Exception:  # after some errors a GPU refuses everything: leave the rest to others
            break


class Pool:
    """``count`` processes; one that dies takes only its own run with it."""

    def __init__(self, count: int, place: Place) -> None:
        # Read by the libraries that the processes load.
        os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._processes = []
        self._links: list[Connection] = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(place, there, self._stop), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._links.append(here)
        self.device = "".join({str(reply["device"]) for reply in self._collect(120.0)})

    def __len__(self) -> int:
        return len(self._links)

    def _collect(self, seconds: float) -> list[Reply]:
        """One reply of every process; those that give none are not asked again."""
        until, replies, owing = time.monotonic() + seconds, [], set(self._links)
        while owing and (ready := wait(owing, max(0.0, until - time.monotonic()))):
            for link in ready:
                assert isinstance(link, Connection)
                owing.discard(link)
                reply = self._reply(link)
                if reply is not None:
                    replies.append(reply)
        for link in owing:
            self._links.remove(link)
        return replies

    def _reply(self, link: Connection) -> Reply | None:
        try:
            reply: Reply = link.recv()
        except (EOFError, OSError):
            self._links.remove(link)
            return None
        return reply

    def probe(self, job: Job, seconds: float = 60.0) -> list[Reply]:
        """All processes time the same steps at the same time."""
        for link in list(self._links):
            try:
                link.send(("probe", job))
            except OSError:
                self._links.remove(link)
        return self._collect(seconds)

    def run(
        self,
        jobs: Iterable[Job],
        *,
        until: float,
        expected_s: float,
        done: Callable[[Job, Reply], None],
    ) -> list[Job]:
        """Runs jobs in order until the time is up; returns those without a result.

        ``expected_s``: what a run takes. None is started that could not end in time.
        """
        left, unfinished = deque(jobs), list[Job]()
        busy: dict[Connection, Job] = {}

        def hand_out(link: Connection) -> None:
            if left and time.monotonic() + expected_s <= until:
                try:
                    link.send(("run", left[0]))
                except OSError:  # it has ended
                    return
                busy[link] = left.popleft()

        for process in self._links:
            hand_out(process)
        while busy and (ready := wait(busy, max(0.0, until - time.monotonic()))):
            for link in ready:
                assert isinstance(link, Connection)
                job, reply = busy.pop(link), self._reply(link)
                if reply is None or "error" in reply:
                    print(f"failed: {job.configuration}, seed {job.seed}: {reply}", flush=True)
                    unfinished.append(job)
                else:
                    done(job, reply)
                    expected_s = reply["seconds"]
                if reply is not None:
                    hand_out(link)
        return [*busy.values(), *left, *unfinished]

    def close(self) -> None:
        self._stop.set()
        for link in self._links:
            try:
                link.send(None)
            except OSError:
                continue
        until = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
