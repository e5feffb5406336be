"""Averages among replicas of which any may die: the others go on with who is left.

A collective of gloo breaks for everybody when one member dies. Here every pair of replicas has an
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.processes.edges import Incoming, Outgoing
from offbeat.processes.wire import Arrival, pack
from offbeat.transport import Gathered, Key

log = logging.getLogger("offbeat")

_KEPT = 2
"""Finished averages of one kind whose parts are kept: nobody is further behind than that."""


class Survivors:
    """One stage's edges to the same stage of the other replicas."""

    def __init__(
        self,
        stage: int,
        replica: int,
        ranks: Sequence[int],
        groups: dict[tuple[int, int], dist.ProcessGroup],
        *,
        device: torch.device,
        deliver: Callable[[Key, Gathered], None],
        declare_dead: Callable[[int], None],
    ) -> None:
        """``ranks``: of this stage in every replica. ``groups``: by (sender, receiver)."""
        self._stage, self._replica = stage, replica
        self._device, self._deliver_average = device, deliver
        self._declare_dead = declare_dead
        self._left = set(range(len(ranks)))
        self._dead: set[int] = set()
        self._parts: dict[Key, dict[int, list[Tensor]]] = defaultdict(dict)
        self._sent_s: dict[Key, float] = {}
        """The averages this replica has started and not completed."""
        self._finished: dict[tuple[str, int], list[Key]] = defaultdict(list)
        self._heard: dict[int, set[int]] = {other: set() for other in self._others()}
        """Whose death each of the others has told us of."""
        self._lock = threading.RLock()
        self._closing = False
        self._out, self._in = {}, {}
        for other in self._others():
            lost = partial(self._lost, other)
            arrived = partial(self._arrived, other)
            self._out[other] = Outgoing(ranks[other], groups[replica, other], lost)
            self._in[other] = Incoming(ranks[other], groups[other, replica], None, arrived, lost)
        for thread in self.threads:
            thread.start()

    @property
    def threads(self) -> list[threading.Thread]:
        return [*self._out.values(), *self._in.values()]

    def _others(self) -> list[int]:
        return sorted(self._left - {self._replica})

    # ---------------------------------------------------------------- averages

    def gather(self, key: Key, parts: Sequence[Tensor]) -> None:
        rows = [part.detach().cpu().contiguous() for part in parts]
        with self._lock:
            self._sent_s[key] = time.perf_counter()
            self._parts[key][self._replica] = rows
            for other in self._others():
                self._out[other].parcels.put(pack(key, rows))
            self._complete(key)

    def _complete(self, key: Key) -> None:
        """Hands an average over once every part is here, or known to be nowhere."""
        found = self._parts[key]
        told = all(self._heard[other] >= self._dead for other in self._others())
        if key not in self._sent_s or self._left - found.keys() or not told:
            return
        in_order = [[part.to(self._device) for part in found[r]] for r in sorted(found)]
        sent_s = self._sent_s.pop(key)
        self._deliver_average(key, Gathered(in_order, sent_s, time.perf_counter(), len(in_order)))
        finished = self._finished[key.what, key.source]
        finished.append(key)
        while len(finished) > _KEPT:
            self._parts.pop(finished.pop(0), None)

    # ---------------------------------------------------------------- losses

    def _lost(self, replica: int, _peer: int, error: RuntimeError | OSError) -> None:
        with self._lock:
            if self._closing or replica in self._dead:
                return
            self._declare_dead(replica)
            self._left.discard(replica)
            self._dead.add(replica)
            left = ", ".join(map(str, sorted(self._left)))
            log.warning(
                "stage %d: replica %d is gone (%s). Averages go on over who is left: replica %s.",
                self._stage, replica, str(error).splitlines()[0], left,
            )  # fmt: skip
            obituary = pack(Key("obituary", self._stage, len(self._dead)), self._estate())
            for other in self._others():
                self._out[other].parcels.put(obituary)
            self._complete_all()

    def _estate(self) -> dict[str, Any]:
        """Who is dead, and all that is held of them."""
        held = [
            [list(key), replica, parts]
            for key, found in self._parts.items()
            for replica, parts in found.items()
            if replica in self._dead
        ]
        return {"dead": sorted(self._dead), "held": held}

    def _arrived(self, sender: int, arrival: Arrival) -> None:
        message = arrival.message(torch.device("cpu"))
        with self._lock:
            if arrival.key.what == "obituary":
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

    def close(self) -> None:
        with self._lock:
            if not self._closing:
                self._closing = True
                for outgoing in self._out.values():
                    outgoing.parcels.put(None)
