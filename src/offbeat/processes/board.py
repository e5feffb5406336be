"""Small notes between processes, kept in the launcher's own store."""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.errors import WorkerLost
from offbeat.processes.edges import Edges
from offbeat.processes.joining import RESTARTS, root_store

_POLL_S = 0.5
_PAUSE_S = 0.002
_GONE = "notes/gone"
NOTICED_S = 4 * _POLL_S
"""Within which every process has surely seen a note."""


LOST = object()
"""In place of the value of a process that died."""
_GIVEN_UP = (
    "the other replicas have lost the connection to this one and go on without it: another of its"
    " processes has ended, or the network between them broke."
)


class Notes:
    """Facts gathered without blocking, over a connection of its own: whoever is missing is named.

    For threads beside the worker's, and for moments at which another process may well be dying.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._size = rank, size

    def gather(self, name: str, value: Any, gone: Callable[[], bool]) -> list[Any]:
        """Every process's value, by rank; None for those still missing when somebody failed.

        ``gone`` says whether this process has noticed that somebody is.
        """
        keys = [f"notes/{name}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(value))
        while not self._store.check(keys) and not self._store.check([_GONE]) and not gone():
            time.sleep(_PAUSE_S)
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]


class Board:
    """Facts to compare, and urgent notes that a thread looks out for: failure, stall, stop."""

    def __init__(
        self, rank: int, size: int, name: str, row: int | None = None, life: int | None = None
    ) -> None:
        """``row``: how many processes make a replica, where one may die without the others.

        ``life``: of a replica that has come back (see :mod:`offbeat.processes.joining`).
        """
        store = dist.distributed_c10d._get_default_store()
        if RESTARTS in os.environ:  # the default store of a replica that came back is its own
            store = root_store()
        self._store = PrefixStore(f"offbeat/{name}", store)
        self._rank, self._size = rank, size
        self._row = row
        own = life if life is not None or row is None else rank // row
        self._failure = "failure" if own is None else f"failure/{own}"
        self._given_up = "" if own is None else f"dead/{own}"
        self._again = "" if life is None else f"/{life}"
        self._counts: dict[str, int] = {}
        self._stop = threading.Event()
        self._edges: Edges | None = None
        self.stop_at: int | None = None
        """The step after which somebody asked all processes to stop."""

    def exchange(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """The values of all ranks, or of some; :data:`LOST` for a dead replica's."""
        count = self._counts[name] = self._counts.get(name, -1) + 1
        self._store.set(f"{name}/{count}/{self._rank}{self._again}", json.dumps(value))
        everyone = range(self._size) if ranks is None else ranks
        return [self._read(f"{name}/{count}/{rank}", rank) for rank in everyone]

    def _read(self, key: str, rank: int) -> Any:
        own = self._row is not None and rank // self._row == self._rank // self._row
        if own:  # and not of those who were here before this replica came back
            key += self._again
        while self._row is not None and not self._store.check([key]):
            if own and self._store.check([self._given_up]):
                raise WorkerLost(_GIVEN_UP)
            if not own and self._store.check([f"dead/{rank // self._row}"]):
                return LOST
            if self._edges is not None and self._edges.failure is not None:
                raise self._edges.failure
            time.sleep(0.02)
        return json.loads(self._store.get(key))

    def declare_dead(self, life: int) -> None:
        """For all to see, the replica itself included, should it be alive somewhere."""
        self._store.set(f"dead/{life}", str(self._rank))

    def is_dead(self, life: int) -> bool:
        return bool(self._store.check([f"dead/{life}"]))

    def say_gone(self) -> None:
        """Ends every gathering of notes: this process will not come to another."""
        self._store.set(_GONE, "yes")

    def notes(self) -> Notes:
        return Notes(self._store, self._rank, self._size)

    def report(self, text: str) -> None:
        # Only the first report counts: what follows it is a consequence.
        note = json.dumps([self._rank, text])
        self._store.compare_set(self._failure, "", note)

    def ask_to_stop(self, step: int) -> None:
        """Only the first request counts; the others read it within moments."""
        self._store.compare_set("stop", "", str(step))

    def watch(self, edges: Edges) -> None:
        self._edges = edges
        self._thread = threading.Thread(target=self._watch, daemon=True, name="offbeat-board")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(4 * _POLL_S)

    def _watch(self) -> None:
        store: Store = self._store.clone()  # type: ignore[attr-defined]
        assert self._edges is not None
        while not self._stop.wait(_POLL_S):
            try:
                if self._given_up and store.check([self._given_up]):
                    self._edges.fail(WorkerLost(_GIVEN_UP))
                    return
                if store.check([self._failure]):
                    rank, text = json.loads(store.get(self._failure))
                    if rank != self._rank:
                        self._edges.fail(WorkerLost(f"rank {rank} failed first:\n{text}"))
                    return
                self.look_for_stop(store)
                if store.check(["stalled"]):
                    self._edges.fail(
                        WorkerLost(f"another process waited too long:\n  {self._tell_waits(store)}")
                    )
                    return
            except RuntimeError:  # the store's host has gone: so has everything else
                self._edges.fail(
                    WorkerLost(
                        "the launcher's store cannot be reached any more: the process that holds"
                        " it (torchrun's agent, or rank 0) has ended; its own output says why."
                    )
                )
                return

    def look_for_stop(self, store: Store | None = None) -> None:
        store = store or self._store
        if self.stop_at is None and store.check(["stop"]):
            self.stop_at = int(store.get("stop"))

    def everyone_waits_for(self) -> str:
        """Asks all processes what they wait for."""
        self._store.set("stalled", "yes")
        return self._tell_waits(self._store)

    def _tell_waits(self, store: Store) -> str:
        assert self._edges is not None
        store.set(f"waits/{self._rank}", f"rank {self._rank}: {self._edges.waits_for()}")
        deadline = time.monotonic() + 4 * _POLL_S
        keys = [f"waits/{rank}" for rank in range(self._size)]
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        lines = [
            store.get(key).decode() if store.check([key]) else f"rank {rank}: no answer"
            for rank, key in enumerate(keys)
        ]
        return "\n  ".join(lines)
