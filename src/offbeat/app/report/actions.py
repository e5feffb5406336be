"""The actions of a run as the page draws them: measured from a ledger, planned from a method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ConfigurationError
from offbeat.methods import method_named
from offbeat.records.ledger import Entry, Ledger, Place, lags_of
from offbeat.schedules.table import Span
from offbeat.schedules.timeline import Timeline, timeline

MOST_ACTIONS = 10_000
"""Actions of a run on a page; the trace has all of them."""
_MOST_STAGES = 256
_NO_LOSS = float("nan")


def planned_entries(line: Timeline) -> list[Entry]:
    """Modelled actions with the versions they read and write."""
    versions = [0] * line.stages
    entries = []
    for span in line.spans:
        stage = span.action.stage
        versions[stage] += span.action.kind == "U"
        entries.append(_entry(span, versions[stage]))
    return entries


def _entry(span: Span, newest: int) -> Entry:
    action = span.action
    version = newest if action.version is None else action.version
    return Entry(action.kind, action.stage, action.batch, version, span.start, span.end, _NO_LOSS)


def plan(method: str | None, settings: Mapping[str, Any], stages: int | None) -> Timeline:
    """The modelled timeline of a stored configuration, a few steps beyond the fill.

    Raises :class:`ConfigurationError`, and nothing else, where the method cannot be built again.
    """
    if method is None or stages is None:
        raise ConfigurationError("the configuration does not name a method and its stages.")
    if stages > _MOST_STAGES:
        raise ConfigurationError(f"{stages} stages are too many to draw.")
    try:
        built = method_named(method, **settings)
        return timeline(built, stages, steps=built.schedule(stages).fill_steps + 6)
    except Exception as error:  # a stored file may hold anything
        raise ConfigurationError(str(error) or type(error).__name__) from error


@dataclass(frozen=True)
class Drawing:
    """Lines of actions over time, as the page's script reads them."""

    lines: tuple[str, ...]
    entries: tuple[Entry, ...]
    places: tuple[int, ...]
    """Per entry, its line."""
    left_out: int
    unit: str
    """``s``, or empty for modelled time."""

    def columns(self) -> dict[str, Any]:
        """Column by column, because that is a third of the size of records."""
        zero = min((entry.start_s for entry in self.entries), default=0.0)
        lags = lags_of(self.entries)
        read = {(e.replica, e.stage, e.batch): e.version for e in self.entries if e.kind == "F"}
        return {
            "unit": self.unit,
            "lines": self.lines,
            "line": self.places,
            "kind": "".join(entry.kind for entry in self.entries),
            "stage": [entry.stage for entry in self.entries],
            "replica": [entry.replica for entry in self.entries],
            "batch": [entry.batch for entry in self.entries],
            "version": [entry.version for entry in self.entries],
            "read": [_of_batch(entry, read) for entry in self.entries],
            "lag": [_of_batch(entry, lags) for entry in self.entries],
            "start": [round(entry.start_s - zero, 6) for entry in self.entries],
            "length": [round(entry.end_s - entry.start_s, 6) for entry in self.entries],
            "loss": [None if e.loss != e.loss else float(f"{e.loss:.6g}") for e in self.entries],
        }


def _of_batch(entry: Entry, found: Mapping[Place, int]) -> int | None:
    if entry.kind not in ("F", "B"):
        return None
    return found.get((entry.replica, entry.stage, entry.batch))


def measured(ledger: Ledger) -> Drawing:
    """The last actions of a ledger; averages under way have lines of their own."""
    entries = sorted(ledger, key=lambda entry: entry.end_s)
    return _drawing(entries[-MOST_ACTIONS:], len(entries), "s")


def planned(line: Timeline) -> Drawing:
    entries = sorted(planned_entries(line), key=lambda entry: entry.start_s)
    return _drawing(entries[:MOST_ACTIONS], len(entries), "")


def _drawing(entries: Sequence[Entry], total: int, unit: str) -> Drawing:
    lines = sorted({_line(entry) for entry in entries})
    several = len({replica for replica, _, _ in lines}) > 1
    places = {line: place for place, line in enumerate(lines)}
    return Drawing(
        tuple(_line_name(*line, several) for line in lines),
        tuple(entries),
        tuple(places[_line(entry)] for entry in entries),
        total - len(entries),
        unit,
    )


def _line(entry: Entry) -> tuple[int, int, bool]:
    return entry.replica, entry.stage, entry.kind == "A"


def _line_name(replica: int, stage: int, average: bool, several: bool) -> str:
    name = f"avg {stage}" if average else f"stage {stage}"
    return f"r{replica} {name}" if several else name
