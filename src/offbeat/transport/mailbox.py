"""The messages of one process: what arrives waits here, what is for others goes on.

Between stages of one process a message is a reference. For another process it is put into the queue
of a thread; another thread per neighbour always has its next receive posted, so messages arrive
while the workers compute. A message for a process further away is passed on by the threads in
between. Which kind of link carries them makes no difference here.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, WorkerLost
from offbeat.transport.base import Gathered, Key, Members
from offbeat.transport.circles import Circles
from offbeat.transport.link import Connection, Pair, Peers
from offbeat.transport.pulse import Pulse, Watched
from offbeat.transport.repeats import Repeats
from offbeat.transport.wire import Arrival

_KNOWN_S = 1.2
"""Within which every process hears who has died."""

Wish = tuple[int, Sequence[Key]]
"""A replica, and the messages that one of its stages waits for."""


class Box:
    """The transport of one replica in a process."""

    def __init__(self, mailbox: "Mailbox", replica: int) -> None:
        self._mailbox, self._replica = mailbox, replica

    def send(self, key: Key, message: Any) -> None:
        self._mailbox.send(self._replica, key, message)

    def arrived(self, key: Key) -> bool:
        return self._mailbox.has((self._replica, [key]))

    def receive(self, key: Key) -> Any:
        """Waits for a message; a failed neighbour or too long a wait ends it with words."""
        self._mailbox.await_any([(self._replica, [key])])
        return self._mailbox.take(self._replica, key)

    def gather(
        self,
        key: Key,
        parts: Sequence[Tensor],
        *,
        summed: bool = False,
        members: Members | None = None,
    ) -> None:
        self._mailbox.gather(self._replica, key, parts, summed=summed, members=members)

    def waiting(self, stage: int) -> dict[Key, Any]:
        return self._mailbox.waiting(self._replica, stage)

    def clear(self) -> None:
        self._mailbox.clear()


class Mailbox:
    """All messages of one process in a row of processes, beside its peers in the other rows."""

    def __init__(
        self,
        rank: int,
        stages: Sequence[int],
        replicas: Sequence[int],
        neighbours: Mapping[int, Pair],
        *,
        device: torch.device,
        timeout_s: float,
        silence_s: float,
        stalled: Callable[[], str],
    ) -> None:
        """``stages``, ``replicas``: those here. ``neighbours``: the links with them, by rank."""
        self._rank, self.stages, self._device = rank, stages, device
        self._timeout_s = timeout_s
        self._stalled = stalled
        self._inbox: dict[tuple[int, Key], Any] = {}
        self._changed = threading.Condition()
        self._failure: OffbeatError | None = None
        self._waiting: tuple[Sequence[Wish], float] | None = None
        self._closing = False
        self.boxes = {replica: Box(self, replica) for replica in replicas}
        self._brought: dict[Key, dict[int, Sequence[Tensor]]] = {}
        """Of averages whose parts not all replicas here have brought yet."""
        self.peers: Peers | None = None
        """The other rows; without any an average is what the replicas here have."""
        self._circles: Circles | None = None
        """The other rows where replicas average with some of the others only."""
        self._neighbours: dict[int, Connection] = {}
        self._repeats: dict[int, Repeats] = {}
        self.watched: list[Watched] = []
        """Others who must be heard now and then."""
        self.add_neighbours(neighbours)
        self._pulse = Pulse(silence_s, self._heard, self._where)
        self._pulse.start()

    def add_neighbours(self, pairs: Mapping[int, Pair]) -> None:
        for other, pair in pairs.items():
            broke = partial(self._lose, f"rank {other}", other)
            deliver = partial(self._deliver, other)
            self._neighbours[other] = Connection(pair, other, deliver, broke)
            self._repeats[other] = Repeats()
        for other in pairs:  # now that one can pass on to another
            self._neighbours[other].start()

    def meet_some(self, rows: Sequence[Sequence[int]], own: int, ranks: Sequence[int]) -> None:
        """Lets replicas average with some of the others: those of all rows, and where each is."""

        def send(row: int, key: Key, message: Any) -> None:
            self._neighbours[ranks[row]].put(key, message)

        self._circles = Circles(rows, own, self._device, send, self._put_for_all)

    # ---------------------------------------------------------------- what boxes ask for

    def send(self, replica: int, key: Key, message: Any) -> None:
        """To its receiver, or to the neighbour that passes it on."""
        if key.to in self.stages:
            self._put(replica, key, message)
        else:
            other = self._rank + (1 if key.to > self.stages[-1] else -1)
            self._neighbours[other].put(key, self._repeats[other].leave_out(key, message))

    def has(self, wish: Wish) -> bool:
        replica, keys = wish
        with self._changed:
            return all((replica, key) in self._inbox for key in keys)

    def take(self, replica: int, key: Key) -> Any:
        with self._changed:
            return self._inbox.pop((replica, key))

    def await_any(self, wishes: Sequence[Wish]) -> None:
        """Until one of them can be met; a failure or too long a wait ends it with words."""
        started = time.monotonic()
        with self._changed:
            self._waiting = (wishes, started)
            while not any(map(self.has, wishes)):
                if self._failure is not None:
                    raise self._failure
                left = self._timeout_s - (time.monotonic() - started)
                if left <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            else:
                self._waiting = None
                return
        everyone = self._stalled()
        raise WorkerLost(
            f"no message for {self._timeout_s:g} s (timeout={self._timeout_s:g}):\n  {everyone}"
        )

    def gather(
        self,
        replica: int,
        key: Key,
        parts: Sequence[Tensor],
        *,
        summed: bool,
        members: Members | None,
    ) -> None:
        """The parts of all replicas here go to the other rows together."""
        brought = self._brought.setdefault(key, {})
        brought[replica] = parts
        if len(brought) < len(self.boxes):
            return
        own = [list(brought[one]) for one in self.boxes]
        del self._brought[key]
        if self.peers is None:
            now_s = time.perf_counter()
            self.put(key, Gathered(own, now_s, now_s, 1))
        elif members is not None and self._circles is not None:
            self._circles.gather(key, own, members)
        elif summed:
            sums = [sum(same[1:], start=same[0]) for same in zip(*own, strict=True)]
            self.peers.gather(key, sums, summed=True)
        else:
            self.peers.gather(key, [part for parts in own for part in parts], summed=False)

    def waiting(self, replica: int, stage: int) -> dict[Key, Any]:
        with self._changed:
            found = self._inbox.items()
            return {key: m for (one, key), m in found if (one, key.to) == (replica, stage)}

    def clear(self) -> None:
        with self._changed:
            self._inbox.clear()
        self._brought.clear()
        if self._circles is not None:
            self._circles.clear()
        for repeats in self._repeats.values():
            repeats.forget_sent()

    # ---------------------------------------------------------------- what arrives

    def put(self, key: Key, gathered: Gathered) -> None:
        """What all rows have brought, for every replica here."""
        here, parts = len(self.boxes), gathered.parts
        if len(parts) > 1:  # not summed on the way
            size = len(parts[0]) // here
            parts = [row[n * size : (n + 1) * size] for row in parts for n in range(here)]
        self._put_for_all(key, gathered._replace(parts=parts, replicas=gathered.replicas * here))

    def _put_for_all(self, key: Key, gathered: Gathered) -> None:
        for replica in self.boxes:
            self._put(replica, key, gathered)

    def _put(self, replica: int, key: Key, message: Any) -> None:
        with self._changed:
            self._inbox[replica, key] = message
            self._changed.notify_all()

    def _deliver(self, sender: int, arrival: Arrival) -> None:
        if arrival.key.what == "weights":
            assert self._circles is not None, "only replicas that average with some send these"
            self._circles.take(arrival.key, arrival.message())
            return
        (replica,) = self.boxes  # a process with neighbours holds stages of one
        here = arrival.key.to in self.stages
        # What is passed on stays where it has arrived.
        message = arrival.message(self._device if here else None)
        self.send(replica, arrival.key, self._repeats[sender].put_back(arrival.key, message))

    # ---------------------------------------------------------------- watching

    def _heard(self) -> Sequence[Sequence[Watched]]:
        if self._closing and not any(thread.is_alive() for thread in self._threads()):
            self._pulse.stop()
        peers = () if self.peers is None else self.peers.connections
        return [*self._neighbours.values()], peers, self.watched

    def _where(self) -> str:
        return f"rank {self._rank} ({self.waits_for()})"

    def waits_for(self) -> str:
        """What the workers wait for right now, in words."""
        waiting = self._waiting
        if waiting is None:
            stages = sorted({self.stages[0], self.stages[-1]})
            whose = f"stage {' to '.join(map(str, stages))}"
            return f"{whose} waits for nothing (it computes, or the script is elsewhere)"
        wishes, since = waiting
        keys = [key for replica, keys in wishes for key in keys if not self.has((replica, [key]))]
        words = [f"stage {key.to} waits for {key} from {key.sender}" for key in keys]
        return f"{', '.join(words)} since {time.monotonic() - since:.1f} s"

    @property
    def failure(self) -> OffbeatError | None:
        return self._failure

    def fail(self, error: OffbeatError) -> None:
        """Ends this and every later wait with an error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def lose_peers(self, error: Exception) -> None:
        """The connection to the other replicas broke; another way it may be known to whom."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _KNOWN_S)
        self._lose("another replica of this stage", None, error)

    def _lose(self, whom: str, rank: int | None, error: Exception) -> None:
        if self._closing:
            return
        if isinstance(error, OffbeatError):
            self.fail(error)
            return
        reason = (str(error) or type(error).__name__).splitlines()[0]
        self.fail(
            WorkerLost(
                f"the connection to {whom} broke ({reason}). That process has died or its"
                " machine cannot be reached; its own output says why.",
                rank=rank,
            )
        )

    # ---------------------------------------------------------------- ending

    def _threads(self) -> list[threading.Thread]:
        threads = [thread for one in self._neighbours.values() for thread in one.threads]
        return [*threads, *(() if self.peers is None else self.peers.threads)]

    def close(self, wait_s: float = 0.0) -> bool:
        """Says goodbye to the neighbours once everything is sent; waits for theirs if asked to.

        Returns whether all threads have ended.
        """
        if not self._closing:
            self._closing = True
            for neighbour in self._neighbours.values():
                neighbour.say_goodbye()
            if self.peers is not None:
                self.peers.close()
        deadline = time.monotonic() + wait_s
        threads = self._threads()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        self._pulse.stop()
        for neighbour in self._neighbours.values():
            neighbour.close()
        return True
