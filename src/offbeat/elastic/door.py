"""A replica that died comes back: how it and the others agree on the step at which it joins.

    launcher    starts its processes again and says who returns
    returning   is at its first batch: here               then connects with whoever meets it
    others      meet it, one pair of connections each, and say so when it stands
    others      when all stand: each promises not to begin a certain step unless the note is there
    anyone      when all have promised: the note, with the latest of these steps and who they are

No promise is made before everything that may fail has worked, and promises need nobody's help but
the threads' here; so nobody is held up for longer than it takes to read a few notes. The launcher
writes "void" in place of the note when the returning processes have died before it, and so does a
process that is done with the run: nobody may wait for its promise.

A *life* is a replica's number, plus the number of replicas for each return that the run has seen
until then: a replica that comes back is not mistaken for the one that died.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.errors import OffbeatError, WorkerLost
from offbeat.transport import Pair, connect_two

RETURN, STAGES, RESTARTS = "OFFBEAT_RETURN", "OFFBEAT_STAGES", "OFFBEAT_RESTARTS"
"""What the launcher tells its children: which return this is, of how many stages; may others."""
VOID = "void"
_PAUSE_S = 0.05
_CONNECTING_S = 15.0
"""Both sides are at it, so this is long."""


def returns_of(root: Store) -> Store:
    """Where the launcher and its processes leave notes about returns."""
    return PrefixStore("offbeat-returns", root)


def return_number() -> int:
    """Which return of a replica this process belongs to; 0 if it was there from the beginning."""
    return int(os.environ.get(RETURN, "0"))


class Admission(NamedTuple):
    """The step before which a replica is let in, and by whom."""

    life: int
    step: int
    members: list[int]
    """The lives of those who let it in."""


def _connect(store: Store, number: int, stage: int, survivor: int, *, returning: bool) -> Pair:
    """Needs nobody but the two, who must both be about to do this."""
    meeting = PrefixStore(f"{number}/pair/{stage}/{survivor}", store.clone())  # type: ignore[attr-defined]
    whom = f"replica {survivor}" if returning else "the one that has come back"
    return connect_two(meeting, _CONNECTING_S, whom, first=not returning)


class Door(threading.Thread):
    """Lets returning replicas in, one after the other: a thread of every process that goes on."""

    def __init__(
        self,
        store: Store,
        rank: int,
        stages: int,
        replicas: int,
        *,
        lost: Callable[[int], bool],
        dead: Callable[[int], bool],
        closed: Callable[[], bool],
        failure: Callable[[], OffbeatError | None],
        lives: dict[int, int],
        after: int,
        timeout_s: float,
    ) -> None:
        """``lost``: whether this process has lost a life; ``dead``: whether anybody has.

        ``lives``: the present ones by replica. ``after``: the last return so far. ``timeout_s``:
        how long a promise may hold up a step.
        """
        super().__init__(daemon=True, name="offbeat-door")
        self._store: Store = returns_of(store.clone())  # type: ignore[attr-defined]
        self._rank, self._stages, self._replicas = rank, stages, replicas
        self._lost, self._dead, self._closed, self._failure = lost, dead, closed, failure
        self._lives, self._after, self._timeout_s = lives, after, timeout_s
        self._changed = threading.Condition()
        self._step = 0
        self._promised: int | None = None
        self._admission: tuple[Admission, Pair] | None = None
        self._connecting: list[threading.Thread] = []

    # ---------------------------------------------------------------- asked by the trainer

    def admission(self, step: int) -> tuple[Admission, Pair] | None:
        """Called before every step: whom to let in now. Waits only if a promise demands it."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            self._step = step
            while self._promised is not None and step >= self._promised:
                if (failure := self._failure()) is not None:
                    raise failure
                if time.monotonic() > deadline:
                    raise WorkerLost(
                        f"rank {self._rank} has promised not to begin step {step} before all agree"
                        " on when a replica comes back, and they have not agreed within"
                        f" {self._timeout_s:g} s (timeout={self._timeout_s:g}): another process is"
                        " stuck. Its own output says why."
                    )
                self._changed.wait(_PAUSE_S)
            found = self._admission
            if found is None or step < found[0].step:
                return None
            self._admission = None
            admission, _ = found
            self._lives[admission.life % self._replicas] = admission.life
            self._changed.notify_all()
            return found

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        try:
            for number in itertools.count(self._after + 1):
                try:
                    found = self._welcome(number)
                except _Closed:
                    if self._failure() is None:  # otherwise the others go on without this one
                        self._store.compare_set(f"{number}/note", "", json.dumps(VOID))
                    raise
                with self._changed:
                    self._promised, self._admission = None, found
                    self._changed.notify_all()
                self._wait(lambda: self._admission is None)
        except (_Closed, RuntimeError):  # the run is over, or the launcher's store has gone
            for thread in self._connecting:  # which must not outlive the interpreter
                thread.join()

    def _welcome(self, number: int) -> tuple[Admission, Pair] | None:
        """Everything up to the note; None if the return came to nothing."""
        who, note = f"{number}/who", f"{number}/note"
        self._wait(lambda: self._there(who))
        replica = int(self._store.get(who))
        stage, own = self._rank % self._stages, self._rank // self._stages

        def until(condition: Callable[[], bool]) -> bool:
            self._wait(lambda: self._there(note) or condition())
            return not self._there(note)

        if not (
            until(lambda: replica not in self._lives or self._lost(self._lives[replica]))
            and until(lambda: self._there(f"{number}/here/{stage}"))
        ):
            return None
        self._store.set(f"{number}/meets/{self._rank}", "yes")
        pair = self._connected(number, stage, own)
        if pair is None:  # it died meanwhile; without us there is no note but "void"
            self._wait(lambda: self._there(note))
            return None
        self._store.set(f"{number}/stands/{self._rank}", "yes")
        if not until(lambda: self._all(f"{number}/stands", replica) is not None):
            return None
        with self._changed:
            self._promised = self._step + 1
        self._store.set(f"{number}/promise/{self._rank}", str(self._promised))
        if until(lambda: (self._all(f"{number}/promise", replica)) is not None):
            ranks = self._all(f"{number}/promise", replica) or []
            step = max(int(self._store.get(f"{number}/promise/{rank}")) for rank in ranks)
            members = sorted({self._lives[rank // self._stages] for rank in ranks})
            self._store.compare_set(note, "", json.dumps([step, members]))
        words = json.loads(self._store.get(note))
        if words == VOID:
            return None
        return Admission(replica + self._replicas * number, *words), pair

    def _connected(self, number: int, stage: int, own: int) -> Pair | None:
        """The connections with a returning replica; None once it has died.

        Made by a thread, because it would wait long for one that died, and so would the next.
        """
        pairs: list[Pair] = []

        def connect() -> None:
            with suppress(RuntimeError):
                pairs.append(_connect(self._store, number, stage, own, returning=False))

        thread = threading.Thread(target=connect, daemon=True, name="offbeat-connecting")
        self._connecting.append(thread)
        thread.start()
        self._wait(lambda: not thread.is_alive() or self._there(f"{number}/note"))
        return pairs[0] if pairs else None

    def _all(self, name: str, returning: int) -> list[int] | None:
        """The ranks of all who live, if each has left such a note."""
        ranks = [
            replica * self._stages + stage
            for replica, life in self._lives.items()
            if replica != returning and not self._dead(life)
            for stage in range(self._stages)
        ]
        return ranks if self._there(*(f"{name}/{rank}" for rank in ranks)) else None

    def _there(self, *keys: str) -> bool:
        return bool(self._store.check(list(keys)))

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._closed() or self._failure() is not None:
                raise _Closed
            time.sleep(_PAUSE_S)


class _Closed(Exception):
    """This process's part in the run is over."""


def knock(
    store: Store,
    number: int,
    rank: int,
    stages: int,
    replicas: int,
    failure: Callable[[], OffbeatError | None],
    timeout_s: float,
) -> tuple[Admission, dict[int, Pair]]:
    """A returning process asks to be let in; returns when, by whom, and its connections by life."""
    replica, stage = divmod(rank, stages)
    note = f"{number}/note"
    pairs: dict[int, Pair] = {}
    store.set(f"{number}/here/{stage}", "yes")
    deadline = time.monotonic() + timeout_s
    while not store.check([note]):
        for other in range(replicas):
            met = store.check([f"{number}/meets/{other * stages + stage}"])
            if other != replica and other not in pairs and met:
                pairs[other] = _connect(store, number, stage, other, returning=True)
        if (ended := failure()) is not None:
            raise ended
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"replica {replica} has come back, and the others have not let it in within"
                f" {timeout_s:g} s (timeout={timeout_s:g}): they have ended, or are busy elsewhere."
            )
        time.sleep(_PAUSE_S)
    words = json.loads(store.get(note))
    if words == VOID:
        raise WorkerLost(
            "this replica came back and cannot join: another of its processes has died, or the"
            " others are done with the run."
        )
    admission = Admission(replica + replicas * number, *words)
    return admission, {life: pairs[life % replicas] for life in admission.members}
