"""This process among those the launcher started: joining, agreeing, sharing, ending together."""

import atexit
import itertools
import os
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, fields
from datetime import timedelta
from functools import cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.checks import checksum_of
from offbeat.errors import BatchError, ConfigurationError, WorkerLost
from offbeat.evaluation import Evaluation, Score
from offbeat.ledger import Ledger
from offbeat.memory import StageMemory
from offbeat.methods import Method
from offbeat.nest import Nest
from offbeat.processes import shared
from offbeat.processes.board import Board
from offbeat.processes.edges import Edges
from offbeat.transport import Key

_FOREVER = timedelta(days=3650)  # our own watchdog decides how long a wait may be


def processes_launched() -> bool:
    """Whether a launcher such as torchrun started more than one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


class Processes:
    """A row of processes, one stage in each, for one trainer."""

    def __init__(self, stages: int, device: torch.device, timeout_s: float) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        _leave_at_exit()
        self._device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        if self.size != stages:
            raise ConfigurationError(
                f"the model has {stages} stages and the launcher started {self.size} processes: one"
                f" stage runs in each. Start {stages} (torchrun --nproc-per-node {stages} ...) or"
                f" cut the model into {self.size} (stages={self.size})."
            )
        everyone = list(range(self.size))
        self._group = _new_group(everyone)
        # Every process makes every group, in the same order: that is how groups find each other.
        pairs = [(k, k + 1) for k in range(stages - 1)]
        edges = [edge for a, b in pairs for edge in ((a, b), (b, a))]
        groups = {edge: _new_group(sorted(edge)) for edge in edges}
        self._board = Board(self.rank, self.size, self._group.group_name)
        self.transport = Edges(
            self.rank,
            stages,
            groups,
            device=device,
            timeout_s=timeout_s,
            ranks=everyone,
            pids=self._neighbours_here(),
            stalled=self._board.everyone_waits_for,
        )
        self._board.watch(self.transport)
        _OPEN.append((self._board, self.transport))
        # A trainer that is dropped says goodbye; its threads end when its neighbours do the same.
        weakref.finalize(self, _say_goodbye, self._board, self.transport)

    def _neighbours_here(self) -> dict[int, int]:
        """Process numbers of the neighbours that share memory with this process, both ways."""
        addresses = self.exchange("address", shared.address())
        mine = addresses[self.rank]
        seen = [shared.reachable(mine, theirs) for theirs in addresses]
        seen_by = self.exchange("seen", seen)
        return {
            other: addresses[other]["pid"]
            for other in (self.rank - 1, self.rank + 1)
            if 0 <= other < self.size and seen[other] and seen_by[other][self.rank]
        }

    # ---------------------------------------------------------------- agreeing

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        return self._board.exchange(name, value)

    def agree_on_setup(self, model: nn.Module, method: Method, seed: int | None) -> int:
        """Refuses processes that were set up differently; returns the seed to use."""
        tensors = model.state_dict()
        shapes = "".join(f"{name}{tuple(t.shape)}{t.dtype}" for name, t in tensors.items())
        self.agree(
            {
                "the method": (describe(method), "Give every process the same method."),
                "the model": (
                    f"{len(tensors)} tensors, digest {crc32(shapes.encode()):08x}",
                    "Build the same model everywhere.",
                ),
                "the type of device": (self._device.type, "Use one type of device."),
                "the number of threads": (
                    torch.get_num_threads(),
                    "It changes the bits: set OMP_NUM_THREADS, or torch.set_num_threads, alike.",
                ),
                "the version of torch": (torch.__version__, "Install one version everywhere."),
                "the seed": (seed, "Give every process the same seed, or none."),
            }
        )
        self.agree(
            {
                "the weights the model starts from": (
                    f"digest {checksum_of(list(tensors.values())):08x}",
                    "Call torch.manual_seed with one number before the model is built.",
                )
            }
        )
        seeds = self.exchange("seed", torch.initial_seed() if seed is None else seed)
        return int(seeds[0])

    def agree(self, facts: dict[str, tuple[Any, str]]) -> None:
        """Compares facts over all processes; names a difference with both values and a remedy."""
        mine = {name: value for name, (value, _) in facts.items()}
        for rank, theirs in enumerate(self.exchange("facts", mine)):
            for name, (value, remedy) in facts.items():
                if theirs[name] != value:
                    first, second = sorted([(self.rank, value), (rank, theirs[name])])
                    raise ConfigurationError(
                        f"{name} differs between processes: {first[1]} on rank {first[0]},"
                        f" {second[1]} on rank {second[0]}. {remedy}"
                    )

    # ---------------------------------------------------------------- data

    def batches(
        self, loader: Iterable[tuple[Nest, Nest]], *, all_need_targets: bool
    ) -> Iterator[tuple[Nest, Nest]]:
        """x for the first process, y for the last (and for the first, which checks them)."""
        length = len(loader) if isinstance(loader, Sized) else None
        lengths = self.exchange("lengths", length)
        for rank, other in enumerate(lengths):
            if other != lengths[0]:
                raise BatchError(
                    f"the loader has {lengths[0]} batches on rank 0 and {other} on rank {rank}:"
                    " give every process the same data."
                )
        first, last = self.rank == 0, self.rank == self.size - 1
        if not (first or last or all_need_targets) and length is not None:
            yield from itertools.repeat((None, None), length)
            return
        for x, y in loader:
            yield x if first else None, y if first or last or all_need_targets else None

    def share_first(self, x: Nest) -> Nest:
        """The first batch of rank 0, for deciding the cut and the heads everywhere alike."""
        if self.rank == 0:
            for other in range(1, self.size):
                self.transport.send(Key("batch", other, 0), x)
            return x
        return self.transport.receive(Key("batch", self.rank, 0))

    # ---------------------------------------------------------------- sharing

    def share_result(self, score: Score, number: int) -> Evaluation:
        """The last process's evaluation, everywhere."""
        last = self.size - 1
        if self.rank == last:
            result = score.result()
            for other in range(last):
                self.transport.send(Key("result", other, number, last), asdict(result))
            return result
        return Evaluation(**self.transport.receive(Key("result", self.rank, number, last)))

    def gather_memory(self, own: Sequence[StageMemory]) -> list[StageMemory]:
        everyone = self.exchange("memory", [asdict(memory) for memory in own])
        return [StageMemory(**memory) for of_rank in everyone for memory in of_rank]

    def merge(self, own: Ledger) -> Ledger:
        """All processes' entries on this machine's clock, in the order in which they ended."""
        clock = time.time() - time.perf_counter()
        clocks = self.exchange("clock", clock)
        ledgers = [Ledger.from_bytes(data) for data in self.share_bytes(own.to_bytes())]
        return Ledger.merged(ledgers, [other - clock for other in clocks])

    def share_tensors(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrites the tensors with those of one process."""
        for tensor in tensors:
            on_cpu = tensor.detach().cpu().contiguous()
            dist.broadcast(on_cpu, source, self._group)
            with torch.no_grad():
                tensor.copy_(on_cpu)

    def share_bytes(self, data: bytes) -> list[bytes]:
        """Every process's bytes, in the order of ranks."""
        sizes = self.exchange("sizes", len(data))
        everyone = []
        for rank, size in enumerate(sizes):
            buffer = torch.empty(size, dtype=torch.uint8)
            if rank == self.rank and size:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if size:
                dist.broadcast(buffer, rank, self._group)
            everyone.append(buffer.numpy().tobytes())
        return everyone

    # ---------------------------------------------------------------- ending

    def report(self, error: BaseException) -> None:
        """Tells the others why this process ends, unless one of them told us."""
        if not isinstance(error, WorkerLost):
            self._board.report("".join(traceback.format_exception(error)))
        self.transport.fail(WorkerLost("this process failed earlier."))


_OPEN: list[tuple[Board, Edges]] = []
"""Whose threads must have ended before the interpreter does."""


def _say_goodbye(board: Board, edges: Edges) -> None:
    board.stop()
    edges.close()


def describe(value: object) -> str:
    """A method and its settings in words that are the same in every process."""
    if isinstance(value, Method):
        settings = (f"{f.name}={describe(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(settings)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    return str(getattr(value, "__qualname__", value))  # a function's address differs


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    # gloo applies the time-out of a group's making to every later receive, so it cannot be short.
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=_FOREVER, backend="gloo")
    return group


@cache
def _leave_at_exit() -> None:
    atexit.register(_leave)


def _leave() -> None:
    """Ends the process group: after the others are done too, or at once when something failed."""
    error = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, WorkerLost):
        for board, _ in _OPEN:
            board.report("".join(traceback.format_exception(error)))
    if error is not None or any(edges.failed for _, edges in _OPEN):
        # Threads may still wait inside gloo for processes that are ending too. Letting the
        # interpreter shut down around them aborts with a core dump instead of an exit code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    for board, edges in _OPEN:
        _say_goodbye(board, edges)
    for board, edges in _OPEN:
        board.join()
        edges.close(wait_s=600.0)
    dist.destroy_process_group()
