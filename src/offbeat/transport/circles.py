"""Averages of which every replica needs the parts of some: only these travel.

Pairs, rings and hierarchies average among few. A process sends a part to those processes that hold
a replica which needs it, and an average is complete when the parts are there that its own need.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from offbeat.transport.base import Gathered, Key, Members

Message = list[Any]
"""Of each replica that it is from the number and the parts."""


class Circles:
    """What this process and those at its place in the other rows give each other."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        own: int,
        device: torch.device,
        send: Callable[[int, Key, Message], None],
        deliver: Callable[[Key, Gathered], None],
    ) -> None:
        """``rows``: the replicas of each, this process being of row ``own``."""
        self._rows, self._own, self._device = rows, own, device
        self._send, self._deliver = send, deliver
        self._lock = threading.Lock()
        self._found: dict[Key, dict[int, Sequence[Tensor]]] = defaultdict(dict)
        self._wanted: dict[Key, tuple[set[int], float]] = {}
        """Of averages started here, whose parts are needed and since when."""

    def gather(self, key: Key, parts: Sequence[Sequence[Tensor]], members: Members) -> None:
        """``parts``: of each replica of this row, in order."""
        here = self._rows[self._own]
        sent_s = perf_counter()
        rows = [[part.detach().cpu().contiguous() for part in own] for own in parts]
        for row, theirs in enumerate(self._rows):
            wanted = self._wanted_by(theirs, members)
            message = [[r, own] for r, own in zip(here, rows, strict=True) if r in wanted]
            if row != self._own and message:
                self._send(row, key, message)
        with self._lock:
            self._wanted[key] = self._wanted_by(here, members), sent_s
            self._found[key] |= dict(zip(here, rows, strict=True))
            self._complete(key)

    @staticmethod
    def _wanted_by(replicas: Sequence[int], members: Members) -> set[int]:
        return {other for replica in replicas for other in members[replica]}

    def take(self, key: Key, message: Message) -> None:
        """What has arrived from another row, perhaps before this one has started the average."""
        with self._lock:
            self._found[key] |= dict(message)
            self._complete(key)

    def _complete(self, key: Key) -> None:
        wanted, sent_s = self._wanted.get(key, (None, 0.0))
        found = self._found[key]
        if wanted is None or not wanted <= found.keys():
            return
        del self._wanted[key], self._found[key]
        senders = sorted(found)
        parts = [[part.to(self._device) for part in found[replica]] for replica in senders]
        self._deliver(key, Gathered(parts, sent_s, perf_counter(), len(senders), senders))

    def clear(self) -> None:
        with self._lock:
            self._wanted.clear()
            self._found.clear()
