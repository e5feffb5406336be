"""What happened: one entry per action, written once, read by plots, reports and checks."""

import heapq
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat

from offbeat.errors import ConfigurationError, StorageError
from offbeat.records import rows
from offbeat.records.certificate import certificate
from offbeat.records.columns import Columns
from offbeat.records.tally import Counts, Line, Tally
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


_END = itemgetter(5)
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


MOST = 100_000
"""How many actions a process keeps in memory, some 5 MB: while it has a file for older ones. Until
then twice as many, so that a run that is taken up again loses none before its first checkpoint."""
_AT_ONCE = 1024


class Ledger(Columns[Entry]):
    """Every action of a run, in the order in which the actions ended.

    The newest are in memory, older ones in files beside the checkpoints. Without a folder they are
    counted, and what only they could answer is refused.
    """

    entry = Entry
    types = rows.FORM
    word, codes = "kind", {kind: ord(kind) for kind in NAMES}
    noun, name = "an entry of a ledger", "ledger"

    def __init__(self, entries: Iterable[Entry] = (), most: int = MOST) -> None:
        self.most = most
        self.declared: Sequence[int] | None = None
        """The lag per stage that the method promises, where a trainer has given the ledger."""
        self._older = Tally()
        self._dropped = 0
        """How many are in no file; they are the oldest."""
        self._parts: list[list[rows.Part]] = [[]]
        """Of older actions, those of each process in their order."""
        self._file: rows.RowFile | None = None
        super().__init__(entries)

    # ---------------------------------------------------------------- older actions

    def keep_in(self, folder: Path) -> None:
        """From here on older actions are appended to a file in this folder."""
        if self._file is None:
            self._file = rows.RowFile(folder)

    def cut_back(self) -> None:
        """Takes away what files have of steps after the checkpoint from which the run goes on."""
        for part in self._parts[0]:
            part.cut_back()

    def settle(self) -> None:
        """Waits until older actions are on disk."""
        if self._file is not None:
            self._file.settle()

    def older(self) -> dict[str, Any]:
        """What :meth:`to_bytes` leaves out: counts of older actions, and where they are."""
        parts = [part.words() for part in self.parts()]
        return {"counts": self._older.words(), "dropped": self._dropped, "parts": parts}

    def take_older(
        self,
        words: dict[str, Any] | None,
        folder: Path | None = None,
        shift_s: float = 0.0,
        only: Collection[Line] | None = None,
    ) -> None:
        """Takes over what :meth:`older` gave, or nothing, as from an earlier version.

        ``folder``: where the files may be now. ``only``: of these lines.
        """
        words = words or {"counts": [], "dropped": 0, "parts": []}
        self._older, self._file = Tally.of(words["counts"], only), None
        self._dropped = words["dropped"]
        for counts in self._older.values():
            counts.shift(shift_s)
        parts = [rows.Part(**part) for part in words["parts"]]
        self._parts = [[part.moved(folder, shift_s, only) for part in parts]]

    def tally(self) -> Tally:
        """Counts of all actions, per stage."""
        counts = Tally.of(self._older.words())
        counts.add(self._arrays)
        return counts

    def certificate(self) -> dict[str, Any]:
        """Declared and measured lags, versions and averages, as JSON that others can check."""
        return certificate(self.tally(), self.declared, self.parts(), self._dropped)

    def parts(self) -> list[rows.Part]:
        """The files that hold older actions."""
        return [*self._own_parts(), *chain(*self._parts[1:])]

    def _own_parts(self) -> list[rows.Part]:
        now = [] if self._file is None else [self._file.part()]
        return [part for part in (*self._parts[0], *now) if part.rows]

    def _shed(self, most: int) -> None:
        """Leaves at most so many in memory."""
        while (count := min(len(self._arrays[0]) - most, _AT_ONCE)) > 0:
            oldest = [column[:count] for column in self._arrays]
            self._older.add(oldest)
            self._put_away(oldest)
            for column in self._arrays:
                del column[:count]

    def _put_away(self, oldest: list[Any]) -> None:
        why = "it has no folder for older ones, which save(folder) gives it"
        if self._file is not None:
            try:
                return self._file.add(oldest)
            except StorageError as error:
                why, self._file = str(error), None
        if not self._dropped:
            warnings.warn(
                f"the ledger keeps the newest {self.most} actions of a process; older ones are"
                f" counted from here on: {why}",
                stacklevel=2,
            )
        self._parts[0], self._dropped = [], self._older.rows
        return None

    def _older_rows(self) -> Iterator[tuple[Any, ...]]:
        if self._dropped:
            raise ConfigurationError(
                f"the first {self._dropped} actions of this ledger are counted only: ask for"
                f" tally(), or for the last ones, tail({self.most}). A run that saves into a folder"
                " from its start keeps all of them in a file."
            )
        processes = [chain(*parts) for parts in (self._own_parts(), *self._parts[1:])]
        yield from processes[0] if len(processes) == 1 else heapq.merge(*processes, key=_END)

    def __len__(self) -> int:
        return self._older.rows + super().__len__()

    def __getitem__(self, index: int) -> Entry:
        place = range(len(self))[index] - self._older.rows
        if place < 0:
            return next(islice(iter(self), place + self._older.rows, None))
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Entry]:
        if not self._older:
            return super().__iter__()
        recent = zip(*self._arrays, strict=True)
        everything: Iterator[tuple[Any, ...]]
        if len(self._parts) > 1:
            everything = heapq.merge(self._older_rows(), recent, key=_END)
        else:
            everything = chain(self._older_rows(), recent)
        return (self._read(list(row)) for row in everything)

    def at(self, stage: int, replica: int = 0) -> Iterator[Entry]:
        if not self._older:
            return super().at(stage, replica)
        return (entry for entry in self if (entry.stage, entry.replica) == (stage, replica))

    # ---------------------------------------------------------------- writing down

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
        row = (ord(kind), stage, batch, version, start_s, end_s, number, replica)
        for add, value in zip(self._adders, row, strict=True):
            add(value)
        most = self.most if self._file is not None else 2 * self.most
        if len(self._arrays[0]) >= most + _AT_ONCE:
            self._shed(most)

    def take_back(self, stage: int, replica: int, batches: Collection[int]) -> None:
        """Strikes out backwards whose gradients were thrown away: no update will apply them."""
        backward, left = ord("B"), {*batches}
        for row in reversed(range(len(self._arrays[0])) if left else ()):
            kind, of_stage, batch, *_, of_replica = (column[row] for column in self._arrays)
            if (kind, of_stage, of_replica) == (backward, stage, replica) and batch in left:
                left.remove(batch)
                for column in self._arrays:
                    del column[row]
            if not left:
                return

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
        """The run as a trace: save it as JSON and open it in Perfetto or chrome://tracing.

        An arrow leads from a micro-batch's forward to its backward at the same stage; both have its
        lag among their arguments.
        """
        zero = min((entry.start_s for entry in self), default=0.0)
        lags = lags_of(self)
        events: list[dict[str, Any]] = []
        lines: set[tuple[int, int]] = set()
        for entry in self:
            # An average under way overlaps its stage's work, so it has a line of its own.
            line = entry.stage + (_AVERAGES if entry.kind == "A" else 0)
            lines.add((entry.replica, line))
            loss = {} if math.isnan(entry.loss) else {"loss": entry.loss}
            late = lags.get((entry.replica, entry.stage, entry.batch))
            if entry.kind in ("F", "B") and late is not None:
                loss |= {"lag": late}
                events.append(_end_of_arrow(entry, late, zero))
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
    def merged(cls, ledgers: Sequence["Ledger"], shifts_s: Iterable[float]) -> "Ledger":
        """One ledger of several, each clock shifted, in the order in which actions ended."""
        made = cls()
        made.join(ledgers, list(shifts_s))
        return made

    def join(self, others: Sequence["Ledger"], shifts_s: Sequence[float]) -> None:
        """Takes in other processes' actions; this one has none yet."""
        recent: list[tuple[Any, ...]] = []
        for other, shift_s in zip(others, shifts_s, strict=True):
            words = other.older()
            for place, line in Tally.of(words["counts"]).items():
                line.shift(shift_s)
                self._older[place] = line
            self._dropped += words["dropped"]
            self._parts.append([rows.Part(**p).moved(None, shift_s) for p in words["parts"]])
            recent += other.recent(shift_s)
        for row in sorted(recent, key=_END):
            self._append(row)

    def recent(self, shift_s: float) -> list[tuple[Any, ...]]:
        """The actions in memory, kinds as numbers, on another clock."""
        everything = zip(*self._arrays, strict=True)
        return [(*row[:4], row[4] + shift_s, row[5] + shift_s, *row[6:]) for row in everything]

    def tail(self, count: int) -> "Ledger":
        """The last entries alone, of those in memory."""
        first = max(len(self) - count, self._older.rows)
        return Ledger(self[index] for index in range(first, len(self)))

    def __repr__(self) -> str:
        stages = sorted({*self.column("stage"), *(stage for _, stage in self._older)})
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

        ``since``: leaves out the entries before this one, where they are still in memory.
        """
        recent = Tally() if since else Tally.of(self._older.words())
        skipped = max(0, since - self._older.rows)
        recent.add([column[skipped:] for column in self._arrays])
        lines = [recent.get((replica, stage), Counts()) for stage in range(stages)]
        first, last = min(line.first_s for line in lines), max(line.last_s for line in lines)
        return [line.work_s / (last - first) if last > first else 0.0 for line in lines]

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


def _end_of_arrow(entry: Entry, lag: int, zero: float) -> dict[str, Any]:
    """Where an arrow leaves a forward, or reaches a backward: in its middle, because a viewer looks
    for the action around that moment."""
    leaves, moment = entry.kind == "F", (entry.start_s + entry.end_s) / 2
    updates = "update" if lag == 1 else "updates"
    return {
        "name": f"F{entry.batch} to B{entry.batch}: {lag} {updates} late",
        "cat": "lag",
        "ph": "s" if leaves else "f",
        "id": f"{entry.replica}/{entry.stage}/{entry.batch}",
        "ts": (moment - zero) * 1e6,
        "pid": entry.replica,
        "tid": entry.stage,
    } | ({} if leaves else {"bp": "e"})


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
