"""The messages of one process in a row: what arrives waits here, what is for others goes on.

Sending puts a message into the queue of a thread; another thread per neighbour always has its next
receive posted, so messages arrive while the worker computes. A message for a stage further away is
passed on by the threads in between. Which kind of link carries them makes no difference here.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, WorkerLost
from offbeat.transport.base import Gathered, Key
from offbeat.transport.link import Connection, Pair, Peers
from offbeat.transport.wire import Arrival


class Mailbox:
    """The transport of one process in a row of processes, one stage each, beside its peers."""

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        neighbours: Mapping[int, Pair],
        *,
        device: torch.device,
        timeout_s: float,
        stalled: Callable[[], str],
    ) -> None:
        """``ranks``: of the row's stages. ``neighbours``: the links with them, by stage."""
        self._stage = stage
        self._device = device
        self._timeout_s = timeout_s
        self._stalled = stalled
        self._inbox: dict[Key, Any] = {}
        self._changed = threading.Condition()
        self._failure: OffbeatError | None = None
        self._waiting: tuple[Key, float] | None = None
        self._closing = False
        self.peers: Peers | None = None
        """The other replicas; without any an average is what this one has."""
        self._neighbours: dict[int, Connection] = {}
        for other, pair in neighbours.items():
            broke = partial(self._lose, f"rank {ranks[other]}", ranks[other])
            self._neighbours[other] = Connection(pair, str(ranks[other]), self._deliver, broke)
        for neighbour in self._neighbours.values():  # now that one can pass on to another
            neighbour.start()

    # ---------------------------------------------------------------- the transport

    def send(self, key: Key, message: Any) -> None:
        """To its receiver, or to the neighbour that passes it on."""
        if key.to == self._stage:
            self.put(key, message)
        else:
            self._neighbours[self._stage + (1 if key.to > self._stage else -1)].put(key, message)

    def arrived(self, key: Key) -> bool:
        with self._changed:
            return key in self._inbox

    def receive(self, key: Key) -> Any:
        """Waits for a message; a failed neighbour or too long a wait ends it with words."""
        started = time.monotonic()
        with self._changed:
            self._waiting = (key, started)
            while key not in self._inbox:
                if self._failure is not None:
                    raise self._failure
                left = self._timeout_s - (time.monotonic() - started)
                if left <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            else:
                self._waiting = None
                return self._inbox.pop(key)
        everyone = self._stalled()
        raise WorkerLost(
            f"no message for {self._timeout_s:g} s (timeout={self._timeout_s:g}):\n  {everyone}"
        )

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool = False) -> None:
        if self.peers is None:
            now_s = time.perf_counter()
            self.put(key, Gathered([list(parts)], now_s, now_s, 1))
        else:
            self.peers.gather(key, parts, summed=summed)

    def waiting(self, stage: int) -> dict[Key, Any]:
        with self._changed:
            return {key: message for key, message in self._inbox.items() if key.to == stage}

    def clear(self) -> None:
        with self._changed:
            self._inbox.clear()

    # ---------------------------------------------------------------- what arrives

    def put(self, key: Key, message: Any) -> None:
        with self._changed:
            self._inbox[key] = message
            self._changed.notify_all()

    def _deliver(self, arrival: Arrival) -> None:
        here = arrival.key.to == self._stage
        # What is passed on stays where it has arrived.
        self.send(arrival.key, arrival.message(self._device if here else None))

    # ---------------------------------------------------------------- watching

    def waits_for(self) -> str:
        """What this worker waits for right now, in words."""
        waiting = self._waiting
        if waiting is None:
            return (
                f"stage {self._stage} waits for nothing (it computes, or the script is elsewhere)"
            )
        key, since = waiting
        return (
            f"stage {self._stage} waits for {key} from {key.sender}"
            f" since {time.monotonic() - since:.1f} s"
        )

    @property
    def failure(self) -> OffbeatError | None:
        return self._failure

    def fail(self, error: OffbeatError) -> None:
        """Ends this and every later wait with an error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def lose_peers(self, error: Exception) -> None:
        """The connection to the other replicas broke."""
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
        threads = [thread for one in self._neighbours.values() for thread in one.threads]
        threads += () if self.peers is None else self.peers.threads
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        for neighbour in self._neighbours.values():
            neighbour.close()
        return True
