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
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.elastic.restarts import RESTARTS, VOID, lost_note, return_number, returns_of
from offbeat.elastic.survivors import Admission, Survivors
from offbeat.engines.board import Board, patiently
from offbeat.engines.placement import Placement
from offbeat.errors import WorkerLost
from offbeat.transport import Pair, connect_two, groups
from offbeat.transport.mailbox import Mailbox

_PAUSE_S = 0.05
_CONNECTING_S = 15.0
"""Both sides are connecting already, so this is ample."""


def _connect(store: Store, number: int, place: int, survivor: int, *, returning: bool) -> Pair:
    """Needs nobody but the two, who must both be about to do this."""
    meeting = PrefixStore(f"{number}/pair/{place}/{survivor}", store.clone())  # type: ignore[attr-defined]
    whom = f"replica {survivor}" if returning else "the one that has come back"
    return connect_two(meeting, _CONNECTING_S, whom, first=not returning)


class Door(threading.Thread):
    """Lets returning replicas in, one after the other: a thread of every process that goes on."""

    def __init__(
        self,
        store: Store,
        placement: Placement,
        survivors: Survivors,
        mailbox: Mailbox,
        is_dead: Callable[[int], bool],
        lives: dict[int, int],
        *,
        timeout_s: float,
    ) -> None:
        """``is_dead``: whether anybody has lost a life. ``lives``: the present ones by replica.

        ``timeout_s``: how long a promise may hold up a step.
        """
        super().__init__(daemon=True, name="offbeat-door")
        self._store: Store = returns_of(store.clone())  # type: ignore[attr-defined]
        self._rank, self._own, self._place = placement.rank, placement.share, placement.place
        self._rows = [placement.row_of(replica) for replica in range(placement.replicas)]
        self._survivors, self._mailbox, self._is_dead = survivors, mailbox, is_dead
        self._lives, self._timeout_s = lives, timeout_s
        self._changed = threading.Condition()
        self._step = 0
        self._promised: int | None = None
        self._admission: tuple[Admission, Pair] | None = None
        self._connecting: list[threading.Thread] = []

    def admission(self, step: int) -> tuple[Admission, Pair] | None:
        """Called before every step: whom to let in now. Waits only if a promise demands it."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            self._step = step
            while self._promised is not None and step >= self._promised:
                if (failure := self._mailbox.failure) is not None:
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
            self._lives[admission.life % len(self._rows)] = admission.life
            self._changed.notify_all()
            return found

    def run(self) -> None:
        try:
            for number in itertools.count(return_number() + 1):
                try:
                    found = self._welcome(number)
                except _Closed:
                    if self._mailbox.failure is None:  # otherwise the others go on without this one
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

        def until(condition: Callable[[], bool]) -> bool:
            self._wait(lambda: self._there(note) or condition())
            return not self._there(note)

        lost = self._survivors.has_lost
        if not (
            until(lambda: replica not in self._lives or lost(self._lives[replica]))
            and until(lambda: self._there(f"{number}/here/{self._place}"))
        ):
            return None
        self._store.set(f"{number}/meets/{self._rank}", "yes")
        pair = self._connected(number)
        if pair is None:  # it died meanwhile; without us there is no note but "void"
            self._wait(lambda: self._there(note))
            return None
        self._store.set(f"{number}/stands/{self._rank}", "yes")
        if not until(lambda: self._all(f"{number}/stands", replica) is not None):
            return None
        with self._changed:
            self._promised = self._step + 1
        self._store.set(f"{number}/promise/{self._rank}", str(self._promised))
        if until(lambda: self._all(f"{number}/promise", replica) is not None):
            ranks = self._all(f"{number}/promise", replica) or []
            step = max(int(self._store.get(f"{number}/promise/{rank}")) for rank in ranks)
            members = sorted({self._lives[rank // len(self._rows[0])] for rank in ranks})
            self._store.compare_set(note, "", json.dumps([step, members]))
        words = json.loads(self._store.get(note))
        if words == VOID:
            return None
        return Admission(replica + len(self._rows) * number, *words), pair

    def _connected(self, number: int) -> Pair | None:
        """The connections with a returning replica; None once it has died.

        Made by a thread, because it would wait long for one that died, and so would the next.
        """
        pairs: list[Pair] = []

        def connect() -> None:
            with suppress(RuntimeError):
                pair = _connect(self._store, number, self._place, self._own, returning=False)
                pairs.append(pair)

        thread = threading.Thread(target=connect, daemon=True, name="offbeat-connecting")
        self._connecting.append(thread)
        thread.start()
        self._wait(lambda: not thread.is_alive() or self._there(f"{number}/note"))
        return pairs[0] if pairs else None

    def _all(self, name: str, returning: int) -> list[int] | None:
        """The ranks of all who live, if each has left such a note."""
        ranks = [
            rank
            for replica, life in self._lives.items()
            if replica != returning and not self._is_dead(life)
            for rank in self._rows[replica]
        ]
        return ranks if self._there(*(f"{name}/{rank}" for rank in ranks)) else None

    def _there(self, *keys: str) -> bool:
        return bool(self._store.check(list(keys)))

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._survivors.closing or self._mailbox.failure is not None:
                raise _Closed
            time.sleep(_PAUSE_S)


class _Closed(Exception):
    """This process's part in the run is over."""


class Membership:
    """The stages here of one replica among others, of which any may die and come back."""

    def __init__(
        self,
        placement: Placement,
        mailbox: Mailbox,
        board: Board,
        *,
        device: torch.device,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        self._silence_s = silence_s
        self._placement, self._mailbox, self._board = placement, mailbox, board
        self._device, self._timeout_s = device, timeout_s
        self._replica, self._place = placement.share, placement.place
        self._rows = [placement.row_of(replica) for replica in range(placement.replicas)]
        self._limit = f"within {timeout_s:g} s (timeout={timeout_s:g})"
        self.door: Door | None = None
        """Lets in who comes back, if the launcher starts processes again."""

    def begin(
        self, pairs: dict[int, Pair], life: int, members: Sequence[int] | None = None
    ) -> Survivors:
        """From now on averages are taken among those who are left."""
        placement, mailbox = self._placement, self._mailbox
        told = returns_of(groups.root_store())
        told.set("silence", str(self._silence_s))
        told.set("row", str(len(placement.row)))
        survivors = mailbox.peers = Survivors(
            self._place,
            life,
            [row[self._place] for row in self._rows],
            pairs,
            device=self._device,
            deliver=mailbox.put,
            declare_dead=self._declare_dead,
            members=members,
        )
        if RESTARTS in os.environ:
            store, is_dead = groups.root_store(), self._board.is_dead
            there = range(placement.replicas) if members is None else [*members, life]
            lives = {one % placement.replicas: one for one in there}
            self.door = Door(
                store, placement, survivors, mailbox, is_dead, lives, timeout_s=self._timeout_s
            )
            survivors.helpers.append(self.door)
            self.door.start()
        return survivors

    def _declare_dead(self, life: int) -> bool:
        """Tells the launcher as well: a process that is frozen does not end by itself."""
        declared = self._board.declare_dead(life)
        if declared:
            patiently(lambda: returns_of(groups.root_store()).set(lost_note(life), "yes"))
        return declared

    def admission(self, step: int) -> tuple[Admission, Pair] | None:
        """Whom to let in before this step, if anybody."""
        return None if self.door is None else self.door.admission(step)

    def admit(self, admission: Admission, pair: Pair, gift: Tensor) -> None:
        """Gives what a replica that has come back needs to go on with the others."""
        assert isinstance(self._mailbox.peers, Survivors)
        self._mailbox.peers.admit(admission, pair, gift)

    def join(self) -> tuple[Admission, list[Tensor]]:
        """Of a replica that has come back: waits to be let in, and for what the others give."""
        number, store = return_number(), returns_of(groups.root_store())
        admission, pairs = self._knock(store, number)
        survivors = self.begin(pairs, admission.life, admission.members)
        self._wait(
            lambda: survivors.gifts() is not None,
            f"the other replicas did not come to step {admission.step}, at which this one joins,"
            f" {self._limit}.",
        )
        gifts = survivors.gifts()
        if not gifts:
            raise WorkerLost("the run ended before this replica could join.")
        survivors.joined = True
        survivors.say_who_is_back(admission)
        store.set(f"{number}/joined/{self._place}", "yes")
        self._board.look_for_stop()  # a later request leaves time enough to be noticed
        return admission, gifts

    def _knock(self, store: Store, number: int) -> tuple[Admission, dict[int, Pair]]:
        """Asks to be let in; returns when, by whom, and the connections by life."""
        note = f"{number}/note"
        pairs: dict[int, Pair] = {}

        def is_answered() -> bool:
            if store.check([note]):
                return True
            for other, row in enumerate(self._rows):
                met = store.check([f"{number}/meets/{row[self._place]}"])
                if other != self._replica and other not in pairs and met:
                    pairs[other] = _connect(store, number, self._place, other, returning=True)
            return False

        store.set(f"{number}/here/{self._place}", "yes")
        self._wait(
            is_answered,
            f"replica {self._replica} has come back, and the others have not let it in"
            f" {self._limit}: they have ended, or are busy elsewhere.",
        )
        words = json.loads(store.get(note))
        if words == VOID:
            raise WorkerLost(
                "this replica came back and cannot join: another of its processes has died, or the"
                " others are done with the run."
            )
        replicas = self._placement.replicas
        admission = Admission(self._replica + replicas * number, *words)
        return admission, {life: pairs[life % replicas] for life in admission.members}

    def _wait(self, condition: Callable[[], bool], words: str) -> None:
        """Until it holds; ``words`` say what it means that it does not within the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            if self._mailbox.failure is not None:
                raise self._mailbox.failure
            if time.monotonic() > deadline:
                raise WorkerLost(words)
            time.sleep(_PAUSE_S)
