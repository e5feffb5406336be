"""Links between processes of one host: memory that both see, and headers over gloo.

Through a socket every byte is copied into the kernel, out of it, and into memory that is fetched
anew for each message. Here the sender copies a tensor once, into a lot of its own; the receiver
works on that very memory. The first byte of a lot says whether it is taken: the sender sets it, and
the receiver clears it when the last tensor over the lot is gone.

A lot is an anonymous file (memfd) that the receiver opens through /proc. It has no name on any
disk and no limit but memory, and it ends with the processes, however they end. A message names a
lot by its number among the sender's open files, and any number could stand in a message: so the
receiver opens only files that bear the secret that the sender has told it over the launcher's
store, and that are sealed against becoming shorter while they are read.
"""

import fcntl
import mmap
import os
import secrets
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.transport.gloo import Gloo
from offbeat.transport.link import End

_PAGE = mmap.PAGESIZE
_WORTHWHILE_BYTES = 1 << 14


class SharedMemory(Gloo):
    """Large tensors lie in memory that both ends see; the header says where."""

    name = "shared memory"

    @classmethod
    def address(cls) -> Any:
        """Where others on this host find this process's memory."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return {"host": host, "pids": os.readlink("/proc/self/ns/pid"), "pid": os.getpid()}
        except OSError:
            return None

    @classmethod
    def reaches(cls, mine: Any, theirs: Any) -> bool:
        """Same host, same numbers of processes, and the right to open the other's memory."""
        if (mine["host"], mine["pids"]) != (theirs["host"], theirs["pids"]):
            return False
        return os.access(f"/proc/{theirs['pid']}/fd", os.X_OK)

    def __init__(self, end: End) -> None:
        super().__init__(end)
        if end.sends:
            end.store.set("secret", secrets.token_hex(16))
        secret = end.store.get("secret").decode()
        self._arena = Arena(secret)
        self._window = Window(end.theirs["pid"], secret)

    def place(self, tensor: Tensor) -> int | None:
        lot = self._arena.room_for(tensor.numel() * tensor.itemsize)
        if lot is None:
            return None
        file, room = lot
        room.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()).copy_(tensor)
        return file

    def find(self, place: Any, count: int) -> Tensor:
        return self._window.look(place, count)


class _Lot:
    """One piece of shared memory: a page that holds the flag, then room for one tensor."""

    def __init__(self, secret: str) -> None:
        self.file = os.memfd_create(f"offbeat-{secret}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.room = 0
        weakref.finalize(self, os.close, self.file)

    @property
    def free(self) -> bool:
        return self.room == 0 or not self._memory[0]

    def take(self, count: int) -> Tensor:
        """Room for as many bytes, which stay until the receiver gives them back."""
        if count > self.room:
            self.room = -(-count // _PAGE) * _PAGE
            os.ftruncate(self.file, _PAGE + self.room)
            self._memory = mmap.mmap(self.file, _PAGE + self.room)
        self._memory[0] = 1
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=_PAGE, count=count)


class Arena:
    """The lots into which one process puts what it sends to one neighbour.

    There are as many as were ever under way at once, each as large as the largest it had to hold.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._lots: list[_Lot] = []
        self._lock = threading.Lock()  # the worker and a thread that passes messages on both send

    def room_for(self, count: int) -> tuple[int, Tensor] | None:
        """A lot's file and memory to fill, or None where a socket does as well."""
        if count < _WORTHWHILE_BYTES:
            return None
        with self._lock:
            free = sorted((lot for lot in self._lots if lot.free), key=lambda lot: lot.room)
            lot = next((lot for lot in free if lot.room >= count), free[-1] if free else None)
            if lot is None:
                lot = _Lot(self._secret)
                self._lots.append(lot)
            return lot.file, lot.take(count)


class Window:
    """The receiver's view of a neighbour's arena."""

    def __init__(self, pid: int, secret: str) -> None:
        self._files = f"/proc/{pid}/fd"
        self._name = f"/memfd:offbeat-{secret} (deleted)"
        self._seen: dict[int, mmap.mmap] = {}

    def look(self, file: int, count: int) -> Tensor:
        """A tensor over a lot. The lot is given back when nothing refers to the tensor any more."""
        if type(file) is not int:
            raise ValueError(f"file {file!r} is not in shared memory")
        memory = self._seen.get(file)
        if memory is None or len(memory) < _PAGE + count:
            memory = self._seen[file] = self._open(file)
        if memory[0] != 1 or len(memory) < _PAGE + count:
            raise ValueError(f"file {file} holds no message of {count} bytes")
        view = np.frombuffer(memory, dtype=np.uint8, offset=_PAGE, count=count)
        weakref.finalize(view, memory.__setitem__, 0, 0).atexit = False
        return torch.from_numpy(view)

    def _open(self, file: int) -> mmap.mmap:
        """Refuses whatever is not a lot of this neighbour's arena, before it is opened."""
        path = f"{self._files}/{file}"
        if os.readlink(path) != self._name:
            raise ValueError(f"file {file} of the sender is not shared memory of this connection")
        with open(path, "r+b") as opened:
            if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"file {file} of the sender could become shorter while it is read")
            return mmap.mmap(opened.fileno(), 0)
