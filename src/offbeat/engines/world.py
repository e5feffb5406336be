"""The processes that a launcher started: joining them, making groups, and ending together."""

import atexit
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from offbeat.elastic.door import return_number
from offbeat.engines.board import Board
from offbeat.errors import ConfigurationError, WorkerLost
from offbeat.transport.gloo import FOREVER, Edges


def is_launched() -> bool:
    """Whether a launcher such as torchrun started more than one process."""
    if return_number():
        return True
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


OPEN: list[tuple[Board, Edges]] = []
"""Whose threads must have ended before the interpreter does."""


def say_goodbye(board: Board, edges: Edges) -> None:
    board.stop()
    edges.close()


def check_size(size: int, stages: int, replicas: int) -> None:
    if size == stages * replicas:
        return
    if replicas == 1:
        raise ConfigurationError(
            f"the model has {stages} stages and the launcher started {size} processes: one"
            f" stage runs in each. Start {stages} (torchrun --nproc-per-node {stages} ...), cut the"
            f" model into {size} (stages={size}), or train replicas of it (replicas=...)."
        )
    raise ConfigurationError(
        f"replicas={replicas} times {stages} {'stage' if stages == 1 else 'stages'} need"
        f" {replicas * stages} processes, and the launcher started {size}. Start"
        f" {replicas * stages} (torchrun --nproc-per-node {replicas * stages} on one machine)."
    )


def check_return(world: int, stages: int, outlive: bool) -> None:
    if world != stages or not outlive or OPEN:
        raise ConfigurationError(
            "this process takes the place of one that died, so its script must do what that one's"
            " did: the first trainer is the one that is joined, with as many stages as before and"
            " when_replica_dies='go on'."
        )


def join(timeout_s: float) -> None:
    """Joins the others; after a restart by torchrun without what the last attempt left behind.

    Its store outlives an attempt, and gloo would connect to addresses of processes that are gone.
    """
    timeout = timedelta(seconds=timeout_s)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0:
        dist.init_process_group("gloo", timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    fresh = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timeout)


def new_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group in which no wait is longer than this, that for its other processes included."""
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    return group


def patient_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group that is connected within this time; later the waits in it may be of any length."""
    group = new_group(ranks, timeout_s)
    if dist.get_rank() in ranks:
        dist.distributed_c10d._set_pg_timeout(FOREVER, group)
    return group


@cache
def leave_at_exit() -> None:
    atexit.register(_leave)


def _leave() -> None:
    """Ends the process group: after the others are done too, or at once when something failed."""
    error = getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, WorkerLost):
        for board, _ in OPEN:
            board.report("".join(traceback.format_exception(error)))
    failures = [edges.failure for _, edges in OPEN if edges.failure is not None]
    if error is None and failures:  # the script was done before it could hear of it
        print(f"{type(failures[0]).__name__}: {failures[0]}", file=sys.stderr)
    if error is not None or failures:
        _end_at_once(130 if isinstance(error, KeyboardInterrupt) else 1)
    for board, edges in OPEN:
        say_goodbye(board, edges)
    for board, edges in OPEN:
        board.join()
        if not edges.close(wait_s=600.0):
            _end_at_once(0)  # others take longer than that, and need nothing from this one
    dist.destroy_process_group()


def _end_at_once(code: int) -> NoReturn:
    """Threads may still wait inside gloo for processes that are ending too. Letting the interpreter
    shut down around them aborts with a core dump instead of an exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
