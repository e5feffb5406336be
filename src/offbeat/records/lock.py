"""Who writes into a folder: one run at a time.

``.lock`` names the processes of the run that writes there. It goes when the run ends. One that a
dead process left is taken over; whether a process lives is known on its own machine alone.
"""

import errno
import fcntl
import os
import secrets
import shlex
import socket
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from offbeat.errors import StorageError
from offbeat.records import disk

NAME = ".lock"
Process = dict[str, Any]
"""A process as another may look for it: see :func:`this_process`."""
Claim = dict[str, Any]
"""What a lock says: a token that nobody else has, ``processes``, and since when."""


def this_process() -> Process:
    """Numbers of processes are given again: one is known by machine, start and name space, too."""
    job, restart = os.environ.get("TORCHELASTIC_RUN_ID", "none"), "TORCHELASTIC_RESTART_COUNT"
    return {
        "host": socket.gethostname(),
        "machine": _text("/etc/machine-id"),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "space": os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "",
        "pid": os.getpid(),
        "start": _start_of(os.getpid()),
        "job": None if job == "none" else job,
        "restart": int(os.environ.get(restart, "0")),
    }


def state_of(process: Process) -> Literal["lives", "dead", "unknown"]:
    """What this process can know of another."""
    here = this_process()
    same_job = here["job"] is not None and here["job"] == process["job"]
    if same_job and process["restart"] < here["restart"]:
        return "dead"  # torchrun ends all processes of a job before it starts them again
    if any(process[name] != here[name] for name in ("host", "machine")):
        return "unknown"
    if process["boot"] != here["boot"]:
        return "dead"
    if process["space"] != here["space"]:
        return "unknown"
    return "lives" if _start_of(process["pid"]) == process["start"] else "dead"


def _start_of(pid: int) -> str | None:
    """When a process was started; None where there is none, or only its exit code is left."""
    if os.path.exists("/proc/self/stat"):
        fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return fields[19] if fields and fields[0] not in "ZX" else None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def key_of(process: Process) -> str:
    return " ".join(str(process[name]) for name in sorted(process))


class Lock:
    """A folder held for a run, by the process that called :meth:`take`."""

    def __init__(self, folder: Path, claim: Claim | None = None) -> None:
        """``claim``: that of the process of this run which has taken it."""
        self.folder = folder
        self.claim = claim or {}
        self._end: Callable[[], object] = lambda: None

    def take(
        self,
        processes: Sequence[Process],
        dead: Collection[str] = (),
        own: Collection[str | None] = (),
    ) -> None:
        """Raises a StorageError while another run has the folder.

        ``dead``: keys of processes that are known to be dead, by others that can look. ``own``:
        tokens by which this run has held the folder, with other processes.
        """
        since = datetime.now(UTC).isoformat(timespec="seconds")
        token = secrets.token_hex(8)
        self.claim = {"token": token, "processes": list(processes), "since": since}
        self._end = weakref.finalize(self, _release, self.folder, token, os.getpid())
        self._write(dead, own)

    def check(self) -> None:
        """Raises a StorageError where another run has taken the folder over."""
        held = holder(self.folder)
        if held is None:
            self._write(())  # somebody took the lock away
        elif held.get("token") != self.claim["token"]:
            raise StorageError(
                f"{self.folder} was taken over by {_names(held)}: this run saves there no more."
                " Give another folder."
            )

    def release(self) -> None:
        self._end()

    def _write(self, dead: Collection[str], own: Collection[str | None] = ()) -> None:
        with suppress(FileExistsError):  # a file: opening the lock in it says so
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / NAME
        flags = os.O_RDWR | os.O_CREAT | disk.NO_LINK
        while True:
            file = os.open(path, flags, 0o666)
            try:
                # Those who look at a lock that a dead process left do so one after the other.
                with suppress(OSError):  # a file system without; then who wrote last has it
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not path.exists() or not os.path.samestat(os.fstat(file), os.stat(path)):
                    continue  # released while we waited
                held = _claim_in(os.pread(file, 1 << 20, 0))
                if held is None or held.get("token") not in own:
                    self._refuse_if_held(held, dead)
                content = disk.sealed(self.claim).encode()
                os.ftruncate(file, 0)
                if os.pwrite(file, content, 0) < len(content):
                    os.ftruncate(file, 0)  # nobody's
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
            finally:
                os.close(file)

    def _refuse_if_held(self, held: Claim | None, dead: Collection[str]) -> None:
        if held is None or held.get("processes") == self.claim["processes"]:
            return  # nobody's, or another trainer's of these processes, which goes on here
        states = {
            "dead" if key_of(process) in dead else state_of(process)
            for process in held.get("processes", ())
        }
        if "lives" in states:
            raise StorageError(
                f"{self.folder} belongs to another run: {_names(held)} writes there, since"
                f" {held['since']}. Give another folder, or wait until it has ended."
            )
        if states != {"dead"}:
            path = shlex.quote(str((self.folder / NAME).absolute()))
            raise StorageError(
                f"{self.folder} belongs to another run, of {_names(held)}, and whether that lives"
                f" cannot be seen from {socket.gethostname()}. Give another folder; or, if you know"
                f" that it has ended, take this one over: rm {path}"
            )
        warnings.warn(
            f"{self.folder} was held by {_names(held)}, which has ended: this run takes it over.",
            stacklevel=6,
        )


def holder(folder: Path) -> Claim | None:
    """What the lock of a folder says; None where there is none."""
    try:
        return _claim_in(disk.read(folder / NAME))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return {}


def _claim_in(content: bytes) -> Claim | None:
    """Empty where these are no such words; None where there are none at all."""
    if not content:
        return None
    try:
        claim, has_digest = disk.unsealed(content)
    except (ValueError, RecursionError):
        return {}
    return claim if has_digest else {}


def _names(held: Claim) -> str:
    processes = held.get("processes")
    if not processes:
        return f"processes that {NAME} does not name any more (it is damaged)"
    others = f" (and {len(processes) - 1} more)" if len(processes) > 1 else ""
    return f"process {processes[0]['pid']} on {processes[0]['host']}{others}"


def _release(folder: Path, token: str, pid: int) -> None:
    with suppress(OSError):  # gone, with its folder
        if os.getpid() == pid and (holder(folder) or {}).get("token") == token:
            (folder / NAME).unlink()
