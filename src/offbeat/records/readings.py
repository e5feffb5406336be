"""What monitors read off a run: how stale it is, how good predictions are, how gradients agree."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from offbeat.errors import ConfigurationError, unknown

What = Literal["staleness", "prediction", "cosine"]
"""``staleness``: lr / (1 - momentum) x curvature x lag. ``prediction``: the error of predicted
weights as a share of the error without prediction. ``cosine``: of stale and fresh gradients."""
WHATS: tuple[What, ...] = get_args(What)


class Reading(NamedTuple):
    what: What
    stage: int
    replica: int
    version: int
    """Of the stage's weights when it was read."""
    value: float


class Readings:
    """Columns of plain numbers, as the ledger has them."""

    def __init__(self) -> None:
        self._whats: array[int] = array("b")
        self._stages: array[int] = array("i")
        self._replicas: array[int] = array("i")
        self._versions: array[int] = array("q")
        self._values: array[float] = array("d")

    @property
    def _columns(self) -> list[array[Any]]:
        return [self._whats, self._stages, self._replicas, self._versions, self._values]

    def record(self, what: What, stage: int, replica: int, version: int, value: float) -> None:
        numbers = (WHATS.index(what), stage, replica, version, value)
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)

    def __repr__(self) -> str:
        counts = Counter(WHATS[what] for what in self._whats)
        return f"Readings({', '.join(f'{what}: {n}' for what, n in counts.items()) or 'none'})"

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Reading]:
        for what, *rest in zip(*self._columns, strict=True):
            yield Reading(WHATS[what], *rest)

    def of(self, what: What, stage: int, replica: int = 0) -> dict[int, float]:
        """One kind of value of one stage, by version."""
        if what not in WHATS:
            raise unknown("reading", what, WHATS)
        wanted = (what, stage, replica)
        return {r.version: r.value for r in self if (r.what, r.stage, r.replica) == wanted}

    def to_bytes(self) -> bytes:
        return b"".join(column.tobytes() for column in self._columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> Readings:
        made = cls()
        made.go_on_from(data)
        return made

    def go_on_from(self, data: bytes) -> None:
        """Takes what :meth:`to_bytes` gave in place of everything so far."""
        count = len(data) // sum(column.itemsize for column in self._columns)
        place = 0
        for column in self._columns:
            size = count * column.itemsize
            del column[:]
            column.frombytes(data[place : place + size])
            place += size

    @classmethod
    def merged(cls, parts: Iterable[Readings]) -> Readings:
        """Of all processes, in the order of stages and versions."""
        made = cls()
        found = [reading for part in parts for reading in part]
        for reading in sorted(found, key=lambda r: (WHATS.index(r.what), *r[1:4])):
            made.record(*reading)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON object per line."""
        with Path(path).open("w") as file:
            for reading in self:
                file.write(json.dumps(reading._asdict()) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Readings:
        made = cls()
        try:
            for line in Path(path).read_text().splitlines():
                made.record(**json.loads(line))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{path}, line {len(made) + 1}: not a reading ({error}). Give a file written by"
                " trainer.readings.save(...)."
            ) from None
        return made
