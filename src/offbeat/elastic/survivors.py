"""Averages among replicas of which any may die: the others go on with who is left.

A collective breaks for everybody when one member dies. Here every pair of replicas has an
edge of its own in each direction, and an average is complete when the parts of all are there. When
a replica is lost, everyone left sends the others an *obituary*: who is dead, and what it still
holds of them. An average that lacks a dead replica's part waits until all who are left have sent
one for all the dead it knows of; then either the part has come with one, or nobody has it and it
is left out. So all who are left decide alike, also about a round that was half sent.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.transport import Pair, connect_two
from offbeat.transport.base import Gathered, Key
from offbeat.transport.link import Connection
from offbeat.transport.wire import Arrival

log = logging.getLogger("offbeat")

_KEPT = 2
"""Finished averages of one kind whose parts are kept: nobody is further behind than that."""


def connect_replicas(
    replica: int, place: int, replicas: int, store: Store, timeout_s: float
) -> dict[int, Pair]:
    """The links of a process with those at the same place in the rows of all other replicas.

    What a replica has sent must arrive even if it dies meanwhile: memory of its own would be gone.
    """
    pairs = {}
    for other in range(replicas):  # in this order nobody waits for one who waits for another
        if other != replica:
            low, high = sorted((replica, other))
            edge = PrefixStore(f"place-{place}/{low}-{high}", store)
            first = replica == low
            pairs[other] = connect_two(edge, timeout_s, f"replica {other}", first=first)
    return pairs


class Admission(NamedTuple):
    """The step before which a replica is let in, and by whom."""

    life: int
    step: int
    members: list[int]
    """The lives of those who let it in."""


class Survivors:
    """The edges of a process to those that hold the same stages of the other replicas."""

    def __init__(
        self,
        place: int,
        replica: int,
        ranks: Sequence[int],
        pairs: Mapping[int, Pair],
        *,
        device: torch.device,
        deliver: Callable[[Key, Gathered], None],
        declare_dead: Callable[[int], bool],
        members: Sequence[int] | None = None,
    ) -> None:
        """``ranks``: at this ``place`` in every row. ``pairs``: the links with each of the others.

        ``declare_dead``: says so for all to see; False if the others go on without this one.

        ``members``: whom a replica that has come back joins; it and they are named by their lives
        (see :mod:`offbeat.elastic.membership`), which at the beginning are the replicas' numbers.
        """
        self._place, self._replica = place, replica
        self._device, self._deliver_average = device, deliver
        self._declare_dead = declare_dead
        self._ranks, self._rank = ranks, ranks[replica % len(ranks)]
        self._left = {*(range(len(ranks)) if members is None else members), replica}
        self._dead: set[int] = set()
        self._parts: dict[Key, dict[int, list[Tensor]]] = defaultdict(dict)
        self._sent_s: dict[Key, float] = {}
        """The averages this replica has started and not completed."""
        self._finished: dict[tuple[str, int, int], list[Key]] = defaultdict(list)
        self._heard: dict[int, set[int]] = {other: set() for other in self._others()}
        """Whose death each of the others has told us of."""
        self._lock = threading.RLock()
        self.closing = False
        self.joined = members is None
        """False while this replica comes back: whoever leaves it then may just be done."""
        self.helpers: list[threading.Thread] = []
        """Threads that end when this is closed."""
        self.welcomes: dict[int, Tensor] = {}
        """What the others have given to this replica, if it has come back."""
        self._connections: dict[int, Connection] = {}
        for other in self._others():
            self._connect(other, pairs[other])

    def _connect(self, other: int, pair: Pair) -> None:
        lost, arrived = partial(self._lost, other), partial(self._arrived, other)
        rank = self._ranks[other % len(self._ranks)]
        self._connections[other] = Connection(pair, rank, arrived, lost)
        self._connections[other].start()

    @property
    def threads(self) -> list[threading.Thread]:
        served = [thread for one in self._connections.values() for thread in one.threads]
        return [*served, *self.helpers]

    @property
    def connections(self) -> Sequence[Connection]:
        # Without the lock: whoever holds it may wait for the launcher's store, and beats may not.
        return [one for other, one in [*self._connections.items()] if other in self._left]

    def _others(self) -> list[int]:
        return sorted(self._left - {self._replica})

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool = False) -> None:  # noqa: ARG002
        # All parts, also where a sum or some would do: of any it may matter who has them.
        rows = [part.detach().cpu().contiguous() for part in parts]
        with self._lock:
            self._sent_s[key] = time.perf_counter()
            self._parts[key][self._replica] = rows
            for other in self._others():
                self._connections[other].put(key, rows)
            self._complete(key)

    def _complete(self, key: Key) -> None:
        """Hands an average over once every part is here, or known to be nowhere."""
        found = self._parts[key]
        told = all(self._heard[other] >= self._dead for other in self._others())
        if key not in self._sent_s or self._left - found.keys() or not told:
            return
        replicas = sorted(found, key=lambda life: life % len(self._ranks))
        in_order = [[part.to(self._device) for part in found[r]] for r in replicas]
        senders = [life % len(self._ranks) for life in replicas]
        times = self._sent_s.pop(key), time.perf_counter()
        self._deliver_average(key, Gathered(in_order, *times, len(in_order), senders))
        finished = self._finished[key.what, key.to, key.source]
        finished.append(key)
        while len(finished) > _KEPT:
            self._parts.pop(finished.pop(0), None)

    def _lost(self, replica: int, error: Exception) -> None:
        with self._lock:
            if self.closing or replica in self._dead:
                return
            if self.joined and not self._declare_dead(replica):
                return  # so no average is made of what this one alone has
            self._left.discard(replica)
            self._dead.add(replica)
            log.warning(
                "rank %d: replica %d is gone (%s). Averages go on over who is left: replica %s.",
                self._rank,
                replica % len(self._ranks),
                str(error).splitlines()[0],
                self._names(),
            )
            for other in self._others():
                self._send_obituary(other)
            self._complete_all()

    def _names(self) -> str:
        return ", ".join(map(str, sorted(life % len(self._ranks) for life in self._left)))

    def _send_obituary(self, other: int) -> None:
        """Who is dead, and all that is held of them."""
        held = [
            [list(key), replica, parts]
            for key, found in self._parts.items()
            for replica, parts in found.items()
            if replica in self._dead
        ]
        estate = {"dead": sorted(self._dead), "held": held}
        self._connections[other].put(Key("obituary", self._place, len(self._dead)), estate)

    def _arrived(self, sender: int, arrival: Arrival) -> None:
        message = arrival.message()
        with self._lock:
            if arrival.key.what == "welcome":
                self.welcomes[sender] = message
            elif arrival.key.what == "obituary":
                self._heard[sender] |= set(message["dead"])
                for words, replica, parts in message["held"]:
                    self._parts[Key(*words)].setdefault(replica, parts)
                self._complete_all()
            else:
                self._parts[arrival.key][sender] = message
                self._complete(arrival.key)

    def _complete_all(self) -> None:
        for key in list(self._sent_s):
            self._complete(key)

    def admit(self, admission: Admission, pair: Pair, gift: Tensor) -> None:
        """Lets in a replica that has come back; from now on averages wait for its part."""
        with self._lock:
            # All who are left have agreed on these members: earlier deaths are settled.
            self._dead &= set(admission.members)
            self._left.add(admission.life)
            self._heard[admission.life] = set()
            self._connect(admission.life, pair)
            self._connections[admission.life].put(Key("welcome", self._place, admission.step), gift)
            if self._dead:
                self._send_obituary(admission.life)
            self.say_who_is_back(admission)

    def say_who_is_back(self, admission: Admission) -> None:
        log.warning(
            "rank %d: replica %d is back and joins at step %d. Averages go on over replica %s.",
            self._rank,
            admission.life % len(self._ranks),
            admission.step,
            self._names(),
        )

    def has_lost(self, life: int) -> bool:
        with self._lock:
            return life not in self._left

    def gifts(self) -> list[Tensor] | None:
        """What those who are left have given, in their order; None while something is missing."""
        with self._lock:
            if any(other not in self.welcomes for other in self._others()):
                return None
            # A member that died after giving has given the same.
            return [self.welcomes[life] for life in sorted(self.welcomes)]

    def close(self) -> None:
        with self._lock:
            if not self.closing:
                self.closing = True
                for connection in self._connections.values():
                    connection.say_goodbye()
