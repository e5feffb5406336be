"""The launcher's part in a return: it starts a dead replica's processes again."""

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

log = logging.getLogger("offbeat")

Child = subprocess.Popen[bytes]
RETURN, ROW, RESTARTS = "OFFBEAT_RETURN", "OFFBEAT_ROW", "OFFBEAT_RESTARTS"
"""What the launcher tells its children: which return this is, of how many processes; may others."""
_RETURNS = "offbeat-returns"
ALIVE_S = 0.5
_SILENCE_S = 30.0
"""Until a run has said what its own is."""
_STARTING_S = 120.0
"""In which a process that is started again must have said something."""
_LOOK_S = 0.25
_GRACE_S = 3.0
"""For one that is alive to hear that it is given up, and to say so."""
VOID = "void"
"""In place of the note by which a return is agreed on, when it has come to nothing."""


def returns_of(root: Store) -> Store:
    """Where the launcher and its processes leave notes about returns."""
    return PrefixStore(_RETURNS, root)


def return_number() -> int:
    """Which return of a replica this process belongs to; 0 if it was there from the beginning."""
    return int(os.environ.get(RETURN, "0"))


def alive_note(number: int, place: int) -> str:
    """Where a process that comes back says, again and again, that it lives."""
    return f"{_RETURNS}/{number}/alive/{place}"


def met_note(rank: int) -> str:
    """Where a process says that it has met all the others."""
    return f"{_RETURNS}/met/{rank}"


def lost_note(life: int) -> str:
    """Where the others tell the launcher whom they go on without."""
    return f"lost/{life}"


class Restarts:
    """Looks after the children of replicas that may be lost, and perhaps come back."""

    def __init__(
        self,
        children: list[Child],
        start: Callable[[int, dict[str, str]], Child],
        store: Store,
        left: int,
    ) -> None:
        """``children``: by rank; those that are started again take their predecessors' places."""
        self._children, self._start = children, start
        self._store = returns_of(store)
        self._left = left
        self._number = 0
        self._size = 0
        self._waiting: range | None = None
        """The ranks that were started again and have not joined yet."""
        self._has_begun = len(children) == 1
        self._returns: dict[int, int] = {}
        """The latest return of a replica."""
        self._lost: dict[int, float] = {}
        """Since when the others have gone on without a life of which processes still run."""
        self._looked_s = self._awake_s = 0.0
        """``_awake_s``: a clock that stands while this process is frozen, which blames nobody."""
        self._silence_s = _SILENCE_S
        self._alive: dict[int, tuple[bytes, float]] = {}
        """What those who come back have said last, by place, and since when."""

    def look(self) -> None:
        """Called again and again while any of the children runs."""
        elapsed_s = time.monotonic() - self._looked_s
        if elapsed_s > _LOOK_S:
            self._looked_s += elapsed_s
            self._awake_s += min(elapsed_s, 2 * _LOOK_S)
            self._find_size()
            self._end_lost()
        if self._waiting is not None:
            self._look_after(self._waiting)
        elif self._left:
            self._look_for_dead()

    def nobody_can_begin(self) -> bool:
        """Whether one has died before all had met: the others would wait for it for long."""
        if self._has_begun or all(child.poll() in (None, 0) for child in self._children):
            return False
        ranks = range(len(self._children))
        dead = [rank for rank in ranks if self._children[rank].poll() not in (None, 0)]
        self._has_begun = self._store.check([f"met/{rank}" for rank in dead])
        return not self._has_begun

    def _find_size(self) -> None:
        if not self._size and self._store.check(["row", "silence"]):
            self._size = int(self._store.get("row"))
            self._silence_s = float(self._store.get("silence"))

    def _end_lost(self) -> None:
        """Kills what is frozen, or cut off: it does not hear that the others go on without it."""
        replicas = len(self._children) // self._size if self._size else 0
        for replica in range(replicas):
            life = replica + replicas * self._returns.get(replica, 0)
            row = self._children[replica * self._size : (replica + 1) * self._size]
            running = [child for child in row if child.poll() is None]
            if running and self._store.check([lost_note(life)]):
                since_s = self._lost.setdefault(life, time.monotonic())
                if time.monotonic() > since_s + _GRACE_S:
                    log.warning("replica %d does not end by itself: it is killed.", replica)
                    for child in running:
                        child.kill()

    def _look_for_dead(self) -> None:
        if not self._size:
            return  # nobody has come as far as to go on without another
        ended = [child.poll() for child in self._children]
        for first in range(0, len(ended), self._size):
            row = range(first, first + self._size)
            of_row = ended[first : first + self._size]
            if None not in of_row and any(of_row) and None in ended:
                self._start_again(row)
                return

    def _start_again(self, row: range) -> None:
        self._left -= 1
        self._number += 1
        replica = row.start // self._size
        self._returns[replica] = self._number
        log.warning("replica %d has died: its processes are started again.", replica)
        more = {RESTARTS: "1", RETURN: str(self._number), ROW: str(self._size)}
        for rank in row:
            stdin = self._children[rank].stdin
            if stdin is not None:
                stdin.close()
            self._children[rank] = self._start(rank, more)
        self._store.set(f"{self._number}/who", str(replica))
        self._waiting, self._alive = row, {}

    def _is_silent(self, place: int) -> bool:
        """Whether a process that comes back is frozen, or cut off."""
        key = f"{self._number}/alive/{place}"
        said = self._store.get(key) if self._store.check([key]) else b""
        before, since_s = self._alive.setdefault(place, (said, self._awake_s))
        if said != before:
            self._alive[place] = said, self._awake_s
            return False
        return self._awake_s > since_s + (self._silence_s if said else _STARTING_S)

    def _look_after(self, row: range) -> None:
        keys = [f"{self._number}/joined/{place}" for place in range(self._size)]
        if self._store.check(keys):
            self._waiting = None
            return
        others = [child for rank, child in enumerate(self._children) if rank not in row]
        alone = all(child.poll() is not None for child in others)  # whom could they join?
        ended = any(self._children[rank].poll() is not None for rank in row)
        if alone or ended or any(map(self._is_silent, range(self._size))):
            for rank in row:  # a replica goes as a whole
                self._children[rank].kill()
        if all(self._children[rank].poll() is not None for rank in row):
            # Unless the others have already agreed to let it in; then they will miss it.
            self._store.compare_set(f"{self._number}/note", "", json.dumps(VOID))
            self._waiting = None
