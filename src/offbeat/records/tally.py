"""What is left of actions that a ledger does not hold any more: counts per stage."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

F, B, U, A, M = map(ord, "FBUAM")


Line = tuple[int, int]
"""Replica and stage."""


@dataclass
class Counts:
    """Of one stage of one replica."""

    rows: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    """How many micro-batches were applied so many updates after their forward."""
    updates: int = 0
    version: int = 0
    """Of the newest update."""
    work_s: float = 0.0
    first_s: float = math.inf
    last_s: float = -math.inf
    merged: int = 0
    """Averages; ``delays``: how many after so many updates since they were started."""
    newest_merged: int | None = None
    """The version at which the newest of them was started."""
    delays: Counter[int] = field(default_factory=Counter)
    averages: int = 0
    """Those of which it is known how long they were waited for."""
    waited_s: float = 0.0
    longest_s: float = 0.0
    forwards: dict[int, int] = field(default_factory=dict)
    """The version that was read, of micro-batches that are still to be applied."""
    waiting: list[int] = field(default_factory=list)
    arrived_s: dict[int, float] = field(default_factory=dict)

    def add(self, kind: int, batch: int, version: int, start_s: float, end_s: float) -> None:
        self.rows += 1
        if kind == F:
            self.forwards[batch] = version
        elif kind == B:
            self.waiting.append(batch)
        elif kind == U:
            self.updates, self.version = self.updates + 1, version
            for applied in self.waiting:
                read = self.forwards.pop(applied, None)
                if read is not None:
                    self.lags[version - 1 - read] += 1
            self.waiting.clear()
        elif kind == A:
            self.arrived_s[batch] = end_s
        elif kind == M:
            self.merged, self.newest_merged = self.merged + 1, batch
            self.delays[version - batch] += 1
            if batch in self.arrived_s:
                waited_s = max(0.0, self.arrived_s.pop(batch) - start_s)
                self.averages, self.waited_s = self.averages + 1, self.waited_s + waited_s
                self.longest_s = max(self.longest_s, waited_s)
        if kind in (F, B, U):
            self.first_s, self.last_s = min(self.first_s, start_s), max(self.last_s, end_s)
            self.work_s += end_s - start_s

    def shift(self, by_s: float) -> None:
        self.first_s, self.last_s = self.first_s + by_s, self.last_s + by_s
        self.arrived_s = {number: moment + by_s for number, moment in self.arrived_s.items()}


class Tally(dict[Line, Counts]):
    def add(self, columns: Iterable[Iterable[Any]]) -> None:
        """``columns``: those of a ledger."""
        for kind, stage, batch, version, start_s, end_s, _, replica in zip(*columns, strict=True):
            line = self.get((replica, stage))
            if line is None:
                line = self[replica, stage] = Counts()
            line.add(kind, batch, version, start_s, end_s)

    @property
    def rows(self) -> int:
        return sum(line.rows for line in self.values())

    def words(self) -> list[Any]:
        """Plain values, which JSON can hold."""
        return [
            [*place, vars(line) | {n: list(getattr(line, n).items()) for n in _BY_NUMBER}]
            for place, line in self.items()
        ]

    @classmethod
    def of(cls, words: list[Any], only: Collection[Line] | None = None) -> "Tally":
        """``only``: of these lines."""
        tally = cls()
        for replica, stage, facts in words:
            if only is None or (replica, stage) in only:
                values = facts | {name: dict(facts[name]) for name in _BY_NUMBER}
                counters = {name: Counter(values[name]) for name in ("lags", "delays")}
                line = Counts(**values | counters)
                tally[replica, stage] = line
                line.waiting = list(line.waiting)
        return tally


_BY_NUMBER = ("lags", "delays", "forwards", "arrived_s")
