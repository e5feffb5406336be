"""Processes for ``offbeat.launch`` that need not import PyTorch: forks of one warm process.

A fresh interpreter spends two seconds on imports, every rank of every launch again. Here a server
imports everything once per test process and forks whenever the launcher asks for a process. A fork
has the command, environment, folder and files of the process it stands for and runs as a main
program of its own. Only its modules are not taken apart at the end, which would copy all the
memory it shares. What concerns the start or the end of an interpreter is tested with real ones:
mark such a test ``fresh_processes``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIPE = subprocess.PIPE


class Server:
    """Started at the first request; ends when this process does, because its socket closes."""

    def __init__(self) -> None:
        self._link: socket.socket | None = None

    def ask(self, request: dict[str, Any], files: list[int]) -> None:
        if self._link is None:
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            paths = os.pathsep.join(filter(None, sys.path))
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads, "PYTHONPATH": paths},
                start_new_session=True,  # an interrupt at the keyboard is none of its business
            )
            theirs.close()
            atexit.register(self.close)
        data = json.dumps(request).encode()
        socket.send_fds(self._link, [data], files)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._process.wait()


SERVER = Server()


class Fork:
    """What the launcher uses of ``subprocess.Popen``."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        their_stdin, our_stdin = os.pipe()
        self._status, their_status = os.pipe()
        request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
        SERVER.ask(request, [their_stdin, 1, 2, their_status])
        os.close(their_stdin)
        os.close(their_status)
        self.stdin = os.fdopen(our_stdin, "wb", buffering=0)
        self.returncode: int | None = None
        self.pid = int(os.read(self._status, 20))

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(os.read(self._status, 20))
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def Popen(command: list[str], *, env: dict[str, str], stdin: int) -> Any:
    """A fork where it is the same as what was asked for, otherwise a process."""
    interpreter, option, *arguments = command
    if (interpreter, option, env["OMP_NUM_THREADS"]) != (sys.executable, "-m", "1"):
        return subprocess.Popen(command, env=env, stdin=stdin)
    return Fork(arguments, env)


# ------------------------------------------------------------------ in the server


def serve(link: socket.socket) -> dict[str, Any]:
    """Forks until its parent ends. A fork returns from here with what it was asked to be."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    reports: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([link.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            report_ends(reports)
        if link.fileno() in ready:
            data, (stdin, stdout, stderr, status), _, _ = socket.recv_fds(link, 1 << 20, 4)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for place, file in enumerate((stdin, stdout, stderr)):
                    os.dup2(file, place)
                for file in (stdin, stdout, stderr, status, ended, wake, *reports.values()):
                    os.close(file)
                link.close()
                request: dict[str, Any] = json.loads(data)
                return request
            reports[pid] = status
            os.write(status, b"%20d" % pid)
            for file in (stdin, stdout, stderr):
                os.close(file)


def report_ends(reports: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = found
            file = reports.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(file, b"%20d" % os.waitstatus_to_exitcode(status))
            os.close(file)


def main() -> None:
    import torch

    import checkpoint_jobs  # noqa: F401
    import jobs  # noqa: F401
    from kill_job import warm_up

    before = torch.get_rng_state()
    warm_up()
    torch.set_rng_state(before)
    threads = os.listdir("/proc/self/task") if Path("/proc/self/task").exists() else []
    assert len(threads) <= 1, "a fork would have a copy of the memory of threads, but no threads"
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        request = serve(link)
    except ValueError:  # nobody asks any more
        return
    with ending_as_a_program():
        run(request)


def run(request: dict[str, Any]) -> None:
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ |= request["environment"]
    random.seed()
    module, *arguments = request["arguments"]
    sys.argv[:] = [module, *arguments]
    sys.path[:] = [os.getcwd(), *os.environ["PYTHONPATH"].split(os.pathsep)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def ending_as_a_program() -> Iterator[None]:
    """Exit code, traceback, threads, exit functions and buffers as at an interpreter's end."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
