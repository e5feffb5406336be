"""What happened: one entry per action, written once, read by plots, reports and checks."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, SupportsFloat

from offbeat.records.columns import Columns
from offbeat.schedules.table import Kind

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


class Ledger(Columns[Entry]):
    """Every action of a run, in the order in which the actions ended."""

    entry = Entry
    types = "biqqdddi"
    word, codes = "kind", {kind: ord(kind) for kind in NAMES}
    noun, name = "an entry of a ledger", "ledger"

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
        number = math.nan if loss is None else float(loss)
        # An Entry would take longer to make than to store, and every action comes by here.
        self._append((ord(kind), stage, batch, version, start_s, end_s, number, replica))

    def go_on_from(self, data: bytes, shift_s: float = 0.0) -> None:
        """Becomes the ledger that :meth:`to_bytes` gave, its clock shifted, to be written on."""
        super().go_on_from(data)
        for column in (self.column("start_s"), self.column("end_s")):
            for index, moment in enumerate(column):
                column[index] = moment + shift_s

    def _to_json(self, entry: Entry) -> dict[str, Any]:
        return entry._asdict() | {"loss": None if math.isnan(entry.loss) else entry.loss}

    @classmethod
    def _from_json(cls, words: Any) -> Entry:
        _refuse_odd(words)
        loss = words.get("loss")
        return Entry(**words | {"loss": math.nan if loss is None else float(loss)})

    def chrome_trace(self) -> dict[str, Any]:
        """The run as a trace: save it as JSON and open it in Perfetto or chrome://tracing."""
        zero = min((entry.start_s for entry in self), default=0.0)
        events: list[dict[str, Any]] = []
        lines: set[tuple[int, int]] = set()
        for entry in self:
            # An average under way overlaps its stage's work, so it has a line of its own.
            line = entry.stage + (_AVERAGES if entry.kind == "A" else 0)
            lines.add((entry.replica, line))
            loss = {} if math.isnan(entry.loss) else {"loss": entry.loss}
            events.append(
                {
                    "name": f"{entry.kind}{entry.batch}",
                    "cat": NAMES[entry.kind],
                    "ph": "X",
                    "ts": (entry.start_s - zero) * 1e6,
                    "dur": (entry.end_s - entry.start_s) * 1e6,
                    "pid": entry.replica,
                    "tid": line,
                    "args": {"version": entry.version} | loss,
                }
            )
        for r, line in sorted(lines):
            averages, stage = divmod(line, _AVERAGES)
            told = {"name": f"averages of stage {stage}" if averages else f"stage {stage}"}
            events.append({"name": "thread_name", "ph": "M", "pid": r, "tid": line, "args": told})
        events += [
            {"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"replica {r}"}}
            for r in sorted({replica for replica, _ in lines})
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    @classmethod
    def merged(cls, ledgers: Iterable["Ledger"], shifts_s: Iterable[float]) -> "Ledger":
        """One ledger of several, each clock shifted, in the order in which actions ended."""
        entries = [
            entry._replace(start_s=entry.start_s + shift, end_s=entry.end_s + shift)
            for ledger, shift in zip(ledgers, shifts_s, strict=True)
            for entry in ledger
        ]
        return cls(sorted(entries, key=lambda entry: entry.end_s))

    def tail(self, count: int) -> "Ledger":
        """The last entries alone."""
        return Ledger(self[index] for index in range(max(0, len(self) - count), len(self)))

    def __repr__(self) -> str:
        stages = sorted(set(self.column("stage")))
        return f"Ledger({len(self)} actions of stages {', '.join(map(str, stages)) or 'none'})"

    def lags(self, stage: int, replica: int = 0) -> dict[int, int]:
        """Measured lag of every applied micro-batch of a stage, in updates."""
        lags = lags_of(self.at(stage, replica))
        return {batch: lag for (_, _, batch), lag in lags.items()}

    def losses(self, stage: int, replica: int = 0) -> dict[int, float]:
        """The loss of every micro-batch forwarded at a stage that has one (the last; DGL: all)."""
        return {
            entry.batch: entry.loss
            for entry in self.at(stage, replica)
            if entry.kind == "F" and entry.loss == entry.loss
        }

    def busy_shares(self, stages: int, replica: int = 0, since: int = 0) -> list[float]:
        """Of the time from the first action to the last, what each stage of a replica worked.

        ``since``: leaves out the entries before this one.
        """
        first, last = math.inf, -math.inf
        work = [0.0] * stages
        for index in range(since, len(self)):
            entry = self[index]
            if entry.replica == replica and entry.kind in "FBU":
                first, last = min(first, entry.start_s), max(last, entry.end_s)
                work[entry.stage] += entry.end_s - entry.start_s
        return [w / (last - first) if last > first else 0.0 for w in work]

    def waits(self, stage: int, replica: int = 0) -> dict[int, float]:
        """Per average, by its number: the seconds for which a stage stood still to merge it.

        0.0 where the average had arrived before it was wanted: communication hidden completely.
        """
        arrived: dict[int, float] = {}
        waits: dict[int, float] = {}
        for entry in self.at(stage, replica):
            if entry.kind == "A":
                arrived[entry.batch] = entry.end_s
            elif entry.kind == "M" and entry.batch in arrived:
                waits[entry.batch] = max(0.0, arrived[entry.batch] - entry.start_s)
        return waits


def _refuse_odd(words: Any) -> None:
    """A ValueError says what is wrong with an entry of a file."""
    if not isinstance(words, dict):
        raise ValueError(f"{words!r} has no names")
    if words.get("kind") not in NAMES:
        raise ValueError(f"kind is {words.get('kind')!r}")
    for name in ("stage", "replica", "batch", "version"):
        number = words.get(name, 0)
        bits = 16 if name in ("stage", "replica") else 62  # what a picture shows, a column holds
        if type(number) is not int or not 0 <= number < 1 << bits:
            raise ValueError(f"{name} is {number!r}")
    for name in ("start_s", "end_s"):
        moment = words.get(name)
        if type(moment) not in (int, float) or not abs(moment) < 1e15:  # type: ignore[arg-type]
            raise ValueError(f"{name} is {moment!r}")


Place = tuple[int, int, int]
"""Replica, stage, micro-batch."""


def lags_of(entries: Iterable[Entry]) -> dict[Place, int]:
    """Per applied micro-batch its lag in updates, where its forward is among the entries: those of
    the end of a run begin with backwards."""
    read: dict[Place, int] = {}
    waiting: dict[tuple[int, int], list[int]] = {}
    lags: dict[Place, int] = {}
    for entry in entries:
        line = entry.replica, entry.stage
        if entry.kind == "F":
            read[*line, entry.batch] = entry.version
        elif entry.kind == "B":
            waiting.setdefault(line, []).append(entry.batch)
        elif entry.kind == "U":
            for batch in waiting.pop(line, ()):
                if (*line, batch) in read:
                    lags[*line, batch] = entry.version - 1 - read[*line, batch]
    return lags
