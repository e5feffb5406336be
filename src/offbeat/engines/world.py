"""The processes that a launcher started: whether there are enough, and how they end together."""

import atexit
import os
import sys
import traceback
from functools import cache
from typing import NoReturn

from offbeat.elastic.restarts import return_number
from offbeat.engines.board import Board
from offbeat.errors import ConfigurationError, WorkerLost
from offbeat.transport import groups
from offbeat.transport.mailbox import Mailbox


def is_launched() -> bool:
    """Whether a launcher such as torchrun started more than one process."""
    if return_number():
        return True
    if groups.are_joined():
        return groups.size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


OPEN: list[tuple[Board, Mailbox]] = []
"""Whose threads must have ended before the interpreter does."""


def say_goodbye(board: Board, edges: Mailbox) -> None:
    board.stop()
    edges.close()


def check_size(size: int, stages: int, replicas: int, outlive: bool) -> None:
    """Whether so many processes can share the stages out."""
    if replicas == 1 and size > stages:
        raise ConfigurationError(
            f"the model has {_counted(stages, 'stage')} and the launcher started {size} processes:"
            f" each runs one stage or more. Start {stages} or fewer (torchrun --nproc-per-node"
            f" {stages} ...), cut the model into {size} (stages={size}), or train replicas of it"
            " (replicas=...)."
        )
    if (size % replicas and replicas % size) or size > stages * replicas:
        most = replicas * stages
        raise ConfigurationError(
            f"replicas={replicas} times {_counted(stages, 'stage')} cannot be shared out among the"
            f" {size} processes that the launcher started: each runs stages of one replica, or"
            f" whole replicas. Start {most} (torchrun --nproc-per-node {most} on one machine), a"
            f" smaller multiple of {replicas}, or a divisor of {replicas}."
        )
    if outlive and size < replicas:
        raise ConfigurationError(
            f"when_replica_dies='go on' with {replicas} replicas in {size} processes: one that dies"
            f" would take {replicas // size} of them with it. Start {replicas} processes or a"
            " multiple of that."
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_return(world: int, row: int, outlive: bool) -> None:
    if world != row or not outlive or OPEN:
        raise ConfigurationError(
            "this process takes the place of one that died, so its script must do what that one's"
            " did: the first trainer is the one that is joined, with as many stages as before and"
            " when_replica_dies='go on'."
        )


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
        ended = board.join()
        if not edges.close(wait_s=600.0) or not ended:
            _end_at_once(0)  # others take longer than that, and need nothing from this one
    groups.leave()


def _end_at_once(code: int) -> NoReturn:
    """Threads may still wait for processes that are ending too. Letting the interpreter
    shut down around them aborts with a core dump instead of an exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
