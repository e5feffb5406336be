"""Local processes without torchrun: for notebooks, tests and quick looks."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from offbeat.elastic.restarts import RESTARTS, Child, Restarts
from offbeat.engines.checks import checked_timeout
from offbeat.errors import ConfigurationError, WorkerLost
from offbeat.methods.base import require_count
from offbeat.records import disk

try:  # functions of a notebook can only be sent by value, which plain pickle does not do
    from cloudpickle import dumps
except ImportError:
    from pickle import dumps

_GRACE_S = 5.0
_LOCALHOST = "127.0.0.1"


def launch(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    threads: int = 1,
    timeout_s: float | None = None,
    go_on: bool = False,
    restart: int = 0,
) -> list[Any]:
    """Calls ``function(*args)`` in K new processes and returns what each returned, by rank.

    Inside, a Trainer finds itself started as if by torchrun. The first error of any process ends
    all of them and is raised here; with ``go_on`` the others are left to finish, and None stands
    for what a failed one would have returned, unless all have failed. With ``restart`` the
    processes of a replica that died are started again, so many times in all, and join the others
    (see docs/replicas.md). Functions defined in a notebook or script need ``cloudpickle``.
    """
    if not callable(function):
        raise ConfigurationError(
            f"function={function!r}: give a function to call in every process."
        )
    require_count("processes", processes)
    require_count("threads", threads)
    if timeout_s is not None:
        checked_timeout(timeout_s, "timeout_s")
    if not isinstance(restart, int) or restart < 0 or (restart and not go_on):
        raise ConfigurationError(
            f"launch(restart={restart}, go_on={go_on}): a number of returns from 0 on, and"
            " go_on=True, so that there are others to join."
        )
    store = _local_store()
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        folder = Path(name)
        disk.write(folder / "call", [_pickled(function, args)])
        more = {RESTARTS: "1"} if restart else {}
        start = partial(_start, processes, store.port, threads, folder)
        children = [start(rank, more) for rank in range(processes)]
        restarts = Restarts(children, start, store, restart)
        try:
            _wait(children, timeout_s, go_on, restarts)
        finally:
            ended_here = _end(children)
        return _results(children, ended_here, folder, go_on)


def _local_store() -> TCPStore:
    """A store that this machine alone can reach: left to itself it listens on every address."""
    listener = socket.create_server((_LOCALHOST, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        _LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call for the children: a function of the script they all belong to goes by its name."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    in_script = getattr(function, "__module__", None) == "__main__" and script is not None
    name = getattr(function, "__qualname__", "")
    try:
        if in_script and "<" not in name:
            return pickle.dumps((str(script), name, args))
        data: bytes = dumps((None, function, args))
        return data
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{getattr(function, '__qualname__', function)} cannot be sent to another process"
            f" ({error}). Move it to the top level of a module, or pip install cloudpickle."
        ) from error


def _start(
    size: int, port: int, threads: int, folder: Path, rank: int, more: dict[str, str]
) -> Child:
    environment = {
        **os.environ,
        **more,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": _LOCALHOST,  # which others ask for, such as accelerate
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "offbeat.engines.child", str(port), str(folder)]
    # The child ends itself when this pipe closes, so that none outlives a killed parent.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)


def _wait(children: list[Child], timeout_s: float | None, go_on: bool, restarts: Restarts) -> None:
    """Until all have ended; one failure gives the others a few seconds to say what they know."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failed = False
    while any(child.poll() is None for child in children):
        ended = any(child.poll() not in (None, 0) for child in children)
        if not failed and ended and (not go_on or restarts.nobody_can_begin()):
            failed, deadline = True, time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            if failed:
                return
            raise WorkerLost(f"launch gave up after timeout_s={timeout_s:g} seconds.")
        restarts.look()
        time.sleep(0.02)


def _end(children: list[Child]) -> set[int]:
    """Kills whoever still runs; returns their ranks."""
    running = {rank for rank, child in enumerate(children) if child.poll() is None}
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
        child.kill()
    for child in children:
        child.wait()
    return running


def _results(children: list[Child], ended_here: set[int], folder: Path, go_on: bool) -> list[Any]:
    results: list[Any] = []
    errors = []
    died: tuple[int, int] | None = None
    for rank, child in enumerate(children):
        file = folder / f"result-{rank}"
        if not file.exists():
            died = died or (None if rank in ended_here else (rank, child.returncode))
            results.append(None)
            continue
        moment, error, value = pickle.loads(file.read_bytes())  # written by our own child
        if error is not None:
            # What happened elsewhere is a consequence: the first error that is not comes first.
            errors.append((isinstance(error, WorkerLost), moment, rank, error))
        results.append(value)
    if go_on and any(child.returncode == 0 for child in children):
        return results
    consequence, _, rank, error = min(errors, key=lambda e: e[:3], default=(True, 0, 0, None))
    if died is not None and consequence:
        code = died[1]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise WorkerLost(f"rank {died[0]} ended with {how} and left no result.")
    if error is not None:
        error.add_note(f"offbeat: raised in rank {rank} of launch().")
        raise error
    return results
