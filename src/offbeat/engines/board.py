"""Small notes between processes, kept in the launcher's own store."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.elastic.restarts import RESTARTS
from offbeat.engines.verbs import Verbs
from offbeat.errors import WorkerLost
from offbeat.transport.groups import default_store, root_store
from offbeat.transport.mailbox import Mailbox

_POLL_S = 0.5
_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.02
_T = TypeVar("_T")
NOTICED_S = 4 * _POLL_S
"""Within which every process has surely seen a note."""

LOST = object()
"""In place of the value of a process that died."""
ASKED_BY_ALL = (
    "What is read from all processes (ledger, readings, updates, memory(), state_dict(),"
    " evaluate()) must be read by all: under 'if trainer.rank == 0' belongs only what is done with"
    " it."
)
_STORE_SILENT = (
    "the launcher's store does not answer: the process that holds it (offbeat.launch, torchrun's"
    " agent, or rank 0) is frozen, or the network between cuts it off."
)
_STORE_GONE = (
    "the launcher's store cannot be reached any more: the process that holds it (torchrun's agent,"
    " or rank 0) has ended; its own output says why."
)
_GIVEN_UP = (
    "the other replicas have lost the connection to this one and go on without it: another of its"
    " processes has ended, or the network between them broke."
)


class SharedNotes:
    """Facts told and heard over a connection of its own: nobody waits for one who has died.

    For threads beside the worker's, and for moments at which another process may well be dying.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        row: int | None,
        gone: str,
        lives: Mapping[int, int],
        failure: Callable[[], Exception | None],
    ) -> None:
        """``row``: as for :class:`Board`. ``gone``: where a process says that it will not come.

        ``lives``: the present one of every replica that has come back. ``failure``: why this
        process has to end, which ends a request to a store that is frozen.
        """
        self._lives = dict(lives)
        self._failure = failure
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._size, self._row, self._gone = rank, size, row, gone

    def tell(self, name: str, value: Any) -> None:
        self._ask(lambda: self._store.set(f"notes/{name}/{self._rank}", json.dumps(value)))

    def hear(
        self, name: str, ranks: Sequence[int] | None, given_up: Callable[[], bool]
    ) -> list[Any]:
        """The values of some ranks, or of all; None for those who have died without telling theirs.

        All who are left hear the same. Only when ``given_up`` ends the wait, because this process
        ends or has waited too long, None is just for whoever is missing.
        """
        try:
            return self._hear(name, ranks, given_up)
        except WorkerLost:
            raise
        except RuntimeError as error:
            raise WorkerLost(_STORE_GONE) from error

    def _ask(self, request: Callable[[], _T]) -> _T:
        return ask(request, self._failure)

    def _hear(
        self, name: str, ranks: Sequence[int] | None, given_up: Callable[[], bool]
    ) -> list[Any]:
        everyone = range(self._size) if ranks is None else ranks
        keys = {rank: f"notes/{name}/{rank}" for rank in everyone}
        missing = self._missing(keys)
        while not all(map(self._died, missing)):
            if self._ask(lambda: self._store.check([self._gone])) or given_up():
                return self._values(keys, self._missing(keys))
            time.sleep(_PAUSE_S)
            missing = self._missing(keys)
        if self._row is not None:
            # A dying replica's other processes may still tell theirs, so that some would hear it
            # and some not: who was missing is decided by the first process that concludes.
            verdict, note = json.dumps(missing), f"notes/{name}/missing"
            missing = json.loads(self._ask(lambda: self._store.compare_set(note, "", verdict)))
        return self._values(keys, missing)

    def _missing(self, keys: dict[int, str]) -> list[int]:
        def look() -> list[int]:
            if self._store.check(list(keys.values())):
                return []
            return [rank for rank, key in keys.items() if not self._store.check([key])]

        return self._ask(look)

    def _values(self, keys: dict[int, str], missing: list[int]) -> list[Any]:
        def look() -> list[Any]:
            return [
                None if rank in missing else json.loads(self._store.get(key))
                for rank, key in keys.items()
            ]

        return self._ask(look)

    def _died(self, rank: int) -> bool:
        if self._row is None:
            return False
        replica = rank // self._row
        dead = f"dead/{self._lives.get(replica, replica)}"
        return self._ask(lambda: self._store.check([dead]))


class Board:
    """Facts to compare, and urgent notes that a thread looks out for: failure, stall, stop."""

    def __init__(
        self,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        row: int | None = None,
        life: int | None = None,
    ) -> None:
        """``timeout_s``: how long to wait for another process's value.

        ``row``: how many processes make a replica, where one may die without the others.

        ``life``: of a replica that has come back (see :mod:`offbeat.elastic.membership`).
        """
        store = default_store()
        if RESTARTS in os.environ:  # the default store of a replica that came back is its own
            store = root_store()
        self._store = PrefixStore(f"offbeat/{name}", store)
        self._rank, self._size = rank, size
        self._row = row
        own = life if life is not None or row is None else rank // row
        self._own = own
        self._timeout_s = timeout_s
        self._failure = "failure" if own is None else f"failure/{own}"
        self._gone = "gone" if own is None else f"gone/{own}"
        self._given_up = "" if own is None else f"dead/{own}"
        self._again = "" if life is None else f"/{life}"
        self._counts: dict[str, int] = {}
        self._verbs = Verbs(rank, self._again)
        self._stop = threading.Event()
        self._edges: Mailbox | None = None
        self.name, self.rank = "the launcher's store", None
        self._answers = self._seen = 0
        self.unheard = 0.0
        self.stop_at: int | None = None
        """The step after which somebody asked all processes to stop."""

    def exchange(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """The values of all ranks, or of some; :data:`LOST` for a dead replica's."""
        count = self._counts[name] = self._counts.get(name, -1) + 1
        everyone = range(self._size) if ranks is None else ranks
        try:
            words = json.dumps(value)
            self._ask(lambda: self._store.set(f"{name}/{count}/{self._rank}{self._again}", words))
            return [self._read(name, f"{name}/{count}/{rank}", rank) for rank in everyone]
        except WorkerLost:
            raise
        except RuntimeError as error:
            raise WorkerLost(_STORE_GONE) from error

    def _ask(self, request: Callable[[], _T]) -> _T:
        deadline = time.monotonic() + self._timeout_s

        def failure() -> Exception | None:
            if self._edges is not None and self._edges.failure is not None:
                return self._edges.failure
            return WorkerLost(_STORE_SILENT) if time.monotonic() > deadline else None

        return ask(request, failure)

    def _read(self, name: str, key: str, rank: int) -> Any:
        own = self._row is not None and rank // self._row == self._rank // self._row
        if own:  # and not of those who were here before this replica came back
            key += self._again
        deadline = time.monotonic() + self._timeout_s
        pause_s = _PAUSE_S
        while not self._ask(lambda: self._store.check([key])):
            if own and self._ask(lambda: self._store.check([self._given_up])):
                raise WorkerLost(_GIVEN_UP)
            if self._row is not None and not own and self.is_dead(rank // self._row):
                return LOST
            failure = self._ask(self.failure)
            if failure is not None:  # first: a broken connection may follow
                raise failure
            if self._edges is not None and self._edges.failure is not None:
                raise self._edges.failure
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"rank {self._rank} has waited {self._timeout_s:g} s"
                    f" (timeout={self._timeout_s:g}) for {name!r} from rank {rank}: that process"
                    " has died, or it does something else. Its own output says what; if all it"
                    f" needs is time, give the trainer a longer timeout. {ASKED_BY_ALL}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return json.loads(self._ask(lambda: self._store.get(key)))

    def declare_dead(self, life: int) -> bool:
        """For all to see, the replica itself included, should it be alive somewhere.

        Two that have lost each other would both do it: the first one is heard. False if the others
        go on without this process, or if the store cannot tell; then it ends.
        """
        verdict = patiently(lambda: self._declare(life))
        if not verdict and self._edges is not None:
            self._edges.fail(WorkerLost(_STORE_SILENT if verdict is None else _GIVEN_UP))
        return bool(verdict)

    def _declare(self, life: int) -> bool:
        while True:
            found = self._store.compare_set("deaths", "", "[]")
            deaths = json.loads(found)
            if self._own in deaths:
                return False
            if life in deaths:
                return True
            longer = json.dumps([*deaths, life])
            if self._store.compare_set("deaths", found.decode(), longer).decode() == longer:
                self._store.set(f"dead/{life}", str(self._rank))
                return True

    def is_dead(self, life: int) -> bool:
        return self._ask(lambda: self._store.check([f"dead/{life}"]))

    def say_gone(self, why: str, lost: int | None) -> WorkerLost | None:
        """Ends every wait of those who cannot go on without this process, which ends now.

        Not all of them have a connection to it that would break: without this they would notice
        only at the next average, and might wait for each other until then.

        ``lost``: the rank to which its connection broke. Returns what came first, if that happened
        in another process, and is not the same loss seen from there.
        """
        note = json.dumps([self._rank, why, lost])

        def say() -> WorkerLost | None:
            _, _, lost_first = json.loads(self._store.compare_set(self._gone, "", note))
            same = lost_first == lost and not self._store.check([self._failure])
            return None if same else self.failure()

        return patiently(say)

    def notes(self, lives: Mapping[int, int]) -> SharedNotes:
        def failure() -> Exception | None:
            return None if self._edges is None else self._edges.failure

        whose = self._rank, self._size, self._row, self._gone
        return SharedNotes(self._store, *whose, lives, failure)

    def report(self, text: str) -> None:
        # Only the first report counts: what follows it is a consequence.
        note = json.dumps([self._rank, text])
        patiently(lambda: self._store.compare_set(self._failure, "", note))

    def failure(self, store: Store | None = None) -> WorkerLost | None:
        """Why this process cannot go on, if another has said so: its error, or just its end."""
        store = store or self._store
        ended = store.check([self._gone])  # asked first: whoever ends has reported its error before
        if store.check([self._failure]):
            key, words = self._failure, "failed first"
        elif ended:
            key, words = self._gone, "has ended"
        else:
            return None
        rank, text, *_ = json.loads(store.get(key))
        return None if rank == self._rank else WorkerLost(f"rank {rank} {words}:\n{text}")

    def ask_to_stop(self, step: int) -> None:
        """Only the first request counts; the others read it within moments."""
        self._ask(lambda: self._store.compare_set("stop", "", str(step)))

    def beat(self) -> None:
        """Counts, as a connection does; its thread asks the store all the time."""
        self.unheard = 0.0 if self._seen != self._answers else self.unheard + 1
        self._seen = self._answers

    def fall_silent(self, error: WorkerLost) -> None:
        assert self._edges is not None
        self._edges.fail(WorkerLost(f"{_STORE_SILENT} ({str(error).partition(':')[0]}.)"))

    @property
    def verbs(self) -> Verbs:
        """What this process has been asked to do together with others."""
        return self._verbs

    def watch(self, edges: Mailbox, company: Sequence[int]) -> None:
        """``company``: the ranks that do the same as this one, or nobody gets anywhere."""
        self._edges, self._company = edges, [rank for rank in company if rank != self._rank]
        edges.watched.append(self)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="offbeat-board")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> bool:
        """Whether its thread has ended; a request to a slow store may still hold it."""
        self._thread.join(4 * _POLL_S)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        store: Store = self._store.clone()  # type: ignore[attr-defined]
        assert self._edges is not None
        while not self._stop.wait(_POLL_S):
            try:
                if self._given_up and store.check([self._given_up]):
                    self._edges.fail(WorkerLost(_GIVEN_UP))
                    return
                if (failure := self.failure(store)) is not None:
                    self._edges.fail(failure)
                    return
                if (lost := self._edges.failure) is not None:
                    # Its worker may be elsewhere for a while, and others wait for who is gone.
                    self.say_gone(str(lost), getattr(lost, "rank", None))
                    return
                self.look_for_stop(store)
                self._answers += 1
                if (words := self._verbs.compare(store, self._company)) is not None:
                    self._edges.fail(WorkerLost(words))
                    return
                if store.check(["stalled"]):
                    self._edges.fail(
                        WorkerLost(f"another process waited too long:\n  {self._tell_waits(store)}")
                    )
                    return
            except RuntimeError:  # the store's host has gone: so has everything else
                self._edges.fail(WorkerLost(_STORE_GONE))
                return
        with suppress(RuntimeError):
            self._verbs.end(store)

    def look_for_stop(self, store: Store | None = None) -> None:
        of = store or self._store
        if self.stop_at is None and self._ask(lambda: of.check(["stop"])):
            self.stop_at = int(self._ask(lambda: of.get("stop")))

    def everyone_waits_for(self) -> str:
        """Asks all processes what they wait for."""

        def look() -> str:
            self._store.set("stalled", "yes")
            return self._tell_waits(self._store)

        silent = "the launcher's store does not answer: the process that holds it is frozen or gone"
        return patiently(look) or silent

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


def ask(request: Callable[[], _T], failure: Callable[[], Exception | None]) -> _T:
    """What the launcher's store says; raises ``failure`` as soon as there is one.

    A request to a store whose process is frozen never returns, so a thread makes it.
    """
    answers: list[_T] = []
    errors: list[RuntimeError] = []

    def make() -> None:
        try:
            answers.append(request())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=make, daemon=True, name="offbeat-request")
    thread.start()
    thread.join(_POLL_S)
    while thread.is_alive():
        if (error := failure()) is not None:
            raise error
        thread.join(_POLL_S)
    if errors:
        raise errors[0]
    return answers[0]


def patiently(request: Callable[[], _T]) -> _T | None:
    """What the launcher's store says; None if it has gone, or says nothing for some seconds."""
    deadline = time.monotonic() + 2 * NOTICED_S
    silent = WorkerLost(_STORE_SILENT)
    try:
        return ask(request, lambda: silent if time.monotonic() > deadline else None)
    except RuntimeError:
        return None
