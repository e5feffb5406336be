"""The processes of one contestant, seen from the parent: start, take a turn, end."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.two_cores.quiet import Watch
from benchmarks.two_cores.variants import Variant

_READY_S = 300.0


class Failed(Exception):
    """A contestant that refused its settings, died or went silent."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One block of a contestant."""

    seconds: float
    """Per batch, of the slowest process."""
    cpu_seconds: list[float]
    """Per batch and process: all its threads together; the rest of the time it waited."""
    foreign_share: float
    """Of the cores that may be used, taken by others: near 0 on a quiet machine."""


class Group:
    """One contestant: process i on the i-th core, or one process on as many as it has threads."""

    def __init__(self, variant: Variant, model: str, cuts: Sequence[int]) -> None:
        self.variant = variant
        self.torch = ""
        self.loss: float | None = None
        self._unread: dict[int, bytes] = {}
        port = _free_port()
        self._processes = [
            self._start(rank, port, model, list(cuts)) for rank in range(variant.processes)
        ]
        try:
            self.torch = self._replies(_READY_S)[0]["ready"]
        except Failed:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def block(self, lead: int, steps: int) -> Turn:
        """Trains ``lead`` batches unwatched, then ``steps`` by the clock."""
        watch = Watch([process.pid for process in self._processes])
        self._signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{lead} {steps}\n".encode())
        replies = self._replies(60.0 + 60.0 * (lead + steps))
        self._signal(signal.SIGSTOP)
        self.loss = next((r["loss"] for r in replies if r["loss"] is not None), None)
        return Turn(
            seconds=max(reply["seconds"] for reply in replies) / steps,
            cpu_seconds=[reply["cpu_seconds"] / steps for reply in replies],
            foreign_share=watch.foreign_share(),
        )

    def memory_bytes(self) -> int:
        """What its processes hold now, shared pages counted in proportion."""
        total = 0
        for process in self._processes:
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                lines = [line.split() for line in file]
            total += next(int(words[1]) * 1024 for words in lines if words[0] == "Pss:")
        return total

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    # ---------------------------------------------------------------- in detail

    def _start(self, rank: int, port: int, model: str, cuts: list[int]) -> subprocess.Popen[bytes]:
        variant, cores = self.variant, sorted(os.sched_getaffinity(0))
        job = {
            "model": model,
            "kind": variant.kind,
            "cuts": cuts,
            "settings": variant.settings,
            "threads": variant.threads,
            "cores": cores[: variant.threads] if variant.processes == 1 else [cores[rank]],
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(variant.threads)}
        if variant.processes > 1:
            environment |= {
                "RANK": str(rank), "WORLD_SIZE": str(variant.processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.two_cores.worker", json.dumps(job)]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def _replies(self, timeout_s: float) -> list[dict[str, Any]]:
        """One line of every process, in the order of ranks; the first refusal ends the wait."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, dict[str, Any]] = {}
        waiting = {self._descriptor(rank): rank for rank in range(len(self._processes))}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], deadline - time.monotonic())
            if not ready:
                raise Failed(f"no answer within {timeout_s:g} s")
            for descriptor in ready:
                rank = waiting[descriptor]
                data = os.read(descriptor, 65536)
                if not data:
                    raise Failed(f"process {rank} ended without a word")
                line = self._unread.pop(rank, b"") + data
                if not line.endswith(b"\n"):
                    self._unread[rank] = line
                    continue
                found[rank] = json.loads(line)
                if "refused" in found[rank]:
                    raise Failed(found[rank]["refused"])
                del waiting[descriptor]
        return [found[rank] for rank in range(len(self._processes))]

    def _signal(self, number: signal.Signals) -> None:
        """Stops or wakes all its threads.

        A process that only waits is not quiet: each of gloo's threads wakes a hundred times a
        second, and dozens of them would take several percent of a core from whoever runs.
        """
        for process in self._processes:
            process.send_signal(number)

    def _descriptor(self, rank: int) -> int:
        pipe = self._processes[rank].stdout
        assert pipe is not None
        return pipe.fileno()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
