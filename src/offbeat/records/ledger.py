"""What happened: one entry per action, written once, read by plots, reports and checks."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat, cast

from offbeat.errors import ConfigurationError, ScheduleError
from offbeat.schedules.table import Kind

_NO_LOSS = float("nan")

Event = Kind | Literal["S", "A", "M"]
"""An action, or what happens to an average: it starts, has arrived, is merged."""

NAMES: dict[Event, str] = {
    "F": "forward",
    "B": "backward",
    "U": "update",
    "S": "start of an average",
    "A": "average under way",
    "M": "merge",
}


_AVERAGES = 1_000_000
"""Added to a stage's number: its averages' line in a trace."""


class Entry(NamedTuple):
    """One action as it was carried out."""

    kind: Event
    stage: int
    batch: int
    """Micro-batch, counted over the whole run; for ``U`` the update's number, for an average the
    version at which it was started."""
    version: int
    """``F``: the version read. ``B``: the newest when it ran. ``U``: the version written."""
    start_s: float
    end_s: float
    loss: float
    """The loss of this micro-batch where the stage has one, otherwise NaN."""
    replica: int = 0


_MOST = {"stage": 1 << 16, "replica": 1 << 16, "batch": 1 << 62, "version": 1 << 62}
"""What a column holds, and a picture can show."""


def _checked(words: dict[str, Any]) -> dict[str, Any]:
    """An entry as it is stored, or a ValueError that says what is wrong with it."""
    if not isinstance(words, dict):
        raise ValueError(f"{words!r} has no names")
    if words.get("kind") not in NAMES:
        raise ValueError(f"kind is {words.get('kind')!r}")
    for name, most in _MOST.items():
        number = words.get(name, 0)
        if type(number) is not int or not 0 <= number < most:
            raise ValueError(f"{name} is {number!r}")
    for name in ("start_s", "end_s"):
        moment = words.get(name)
        if type(moment) not in (int, float) or not abs(moment) < 1e15:  # type: ignore[arg-type]
            raise ValueError(f"{name} is {moment!r}")
    return words


class Ledger:
    """Columns of plain numbers, about 50 bytes an entry, so that it can stay on in long runs."""

    def __init__(self) -> None:
        self._kinds: array[int] = array("b")
        self._stages: array[int] = array("i")
        self._batches: array[int] = array("q")
        self._versions: array[int] = array("q")
        self._starts: array[float] = array("d")
        self._ends: array[float] = array("d")
        self._losses: array[float] = array("d")
        self._replicas: array[int] = array("i")

    def record(
        self,
        kind: Event,
        stage: int,
        batch: int,
        version: int,
        start_s: float,
        end_s: float,
        loss: SupportsFloat | None = None,
        replica: int = 0,
    ) -> None:
        self._kinds.append(ord(kind))
        self._stages.append(stage)
        self._batches.append(batch)
        self._versions.append(version)
        self._starts.append(start_s)
        self._ends.append(end_s)
        self._losses.append(_NO_LOSS if loss is None else float(loss))
        self._replicas.append(replica)

    @property
    def _columns(self) -> list[array[Any]]:
        return [
            self._kinds,
            self._stages,
            self._batches,
            self._versions,
            self._starts,
            self._ends,
            self._losses,
            self._replicas,
        ]

    def to_bytes(self) -> bytes:
        """All entries, column by column, for a process that can trust the sender's numbers."""
        return b"".join(column.tobytes() for column in self._columns)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        ledger = cls()
        count = len(data) // sum(column.itemsize for column in ledger._columns)
        place = 0
        for column in ledger._columns:
            size = count * column.itemsize
            column.frombytes(data[place : place + size])
            place += size
        return ledger

    def go_on_from(self, data: bytes, shift_s: float) -> None:
        """Becomes the ledger that :meth:`to_bytes` gave, its clock shifted, to be written on."""
        found = Ledger.from_bytes(data)
        for column, values in zip(self._columns, found._columns, strict=True):
            del column[:]
            column.extend(values)
        for column in (self._starts, self._ends):
            for index, moment in enumerate(column):
                column[index] = moment + shift_s

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON object per line: what ``offbeat timeline --measured`` reads."""
        with Path(path).open("w") as file:
            for entry in self:
                words = entry._asdict()
                words["loss"] = None if math.isnan(entry.loss) else entry.loss
                file.write(json.dumps(words) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ledger:
        """Reads what :meth:`save` wrote."""
        ledger = cls()
        try:
            for line in Path(path).read_text().splitlines():
                ledger.record(**_checked(json.loads(line)))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"{path}, line {len(ledger) + 1}: not an entry of a ledger ({error}). Give a file"
                " written by trainer.ledger.save(...)."
            ) from None
        return ledger

    def chrome_trace(self) -> dict[str, Any]:
        """The run as a trace: save it as JSON and open it in Perfetto or chrome://tracing."""
        zero = min((entry.start_s for entry in self), default=0.0)
        events: list[dict[str, Any]] = [
            {
                "name": f"{entry.kind}{entry.batch}",
                "cat": NAMES[entry.kind],
                "ph": "X",
                "ts": (entry.start_s - zero) * 1e6,
                "dur": (entry.end_s - entry.start_s) * 1e6,
                "pid": entry.replica,
                # An average under way overlaps its stage's work, so it has a line of its own.
                "tid": entry.stage if entry.kind != "A" else _AVERAGES + entry.stage,
                "args": {"version": entry.version}
                | ({} if math.isnan(entry.loss) else {"loss": entry.loss}),
            }
            for entry in self
        ]
        for replica, stage, average in sorted(
            {(entry.replica, entry.stage, entry.kind == "A") for entry in self}
        ):
            name = f"averages of stage {stage}" if average else f"stage {stage}"
            line = _AVERAGES + stage if average else stage
            events.append(
                {"name": "thread_name", "ph": "M", "pid": replica, "tid": line,
                 "args": {"name": name}}
            )  # fmt: skip
        events += [
            {"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"replica {r}"}}
            for r in sorted({entry.replica for entry in self})
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    @classmethod
    def merged(cls, ledgers: Iterable[Ledger], shifts_s: Iterable[float]) -> Ledger:
        """One ledger of several, each clock shifted, in the order in which actions ended."""
        entries = [
            entry._replace(start_s=entry.start_s + shift, end_s=entry.end_s + shift)
            for ledger, shift in zip(ledgers, shifts_s, strict=True)
            for entry in ledger
        ]
        merged = cls()
        for entry in sorted(entries, key=lambda entry: entry.end_s):
            merged.record(*entry)
        return merged

    def tail(self, count: int) -> Ledger:
        """The last entries alone."""
        short = Ledger()
        for index in range(max(0, len(self) - count), len(self)):
            short.record(*self[index])
        return short

    def __repr__(self) -> str:
        stages = sorted(set(self._stages))
        return f"Ledger({len(self)} actions of stages {', '.join(map(str, stages)) or 'none'})"

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, index: int) -> Entry:
        return Entry(
            cast(Event, chr(self._kinds[index])),
            self._stages[index],
            self._batches[index],
            self._versions[index],
            self._starts[index],
            self._ends[index],
            self._losses[index],
            self._replicas[index],
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[index] for index in range(len(self)))

    def lags(self, stage: int, replica: int = 0) -> dict[int, int]:
        """Measured lag of every applied micro-batch of a stage, in updates."""
        read: dict[int, int] = {}
        waiting: list[int] = []
        lags: dict[int, int] = {}
        for entry in self:
            if (entry.stage, entry.replica) != (stage, replica):
                continue
            if entry.kind == "F":
                read[entry.batch] = entry.version
            elif entry.kind == "B":
                waiting.append(entry.batch)
            elif entry.kind == "U":
                for batch in waiting:
                    if batch not in read:
                        raise ScheduleError(f"the ledger has {stage}B{batch} without its forward.")
                    lags[batch] = entry.version - 1 - read[batch]
                waiting = []
        return lags

    def losses(self, stage: int, replica: int = 0) -> dict[int, float]:
        """The loss of every micro-batch forwarded at a stage that has one (the last; DGL: all)."""
        return {
            entry.batch: entry.loss
            for entry in self
            if (entry.stage, entry.replica, entry.kind) == (stage, replica, "F")
            and entry.loss == entry.loss
        }

    def waits(self, stage: int, replica: int = 0) -> dict[int, float]:
        """Per average, by its number: the seconds for which a stage stood still to merge it.

        0.0 where the average had arrived before it was wanted: communication hidden completely.
        """
        arrived: dict[int, float] = {}
        waits: dict[int, float] = {}
        for entry in self:
            if (entry.stage, entry.replica) != (stage, replica):
                continue
            if entry.kind == "A":
                arrived[entry.batch] = entry.end_s
            elif entry.kind == "M" and entry.batch in arrived:
                waits[entry.batch] = max(0.0, arrived[entry.batch] - entry.start_s)
        return waits
