"""The timelines of the page: measured from a ledger and planned from a method, as actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from offbeat.app.report import words
from offbeat.app.report.cases import Case, per_case
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, join, note, tag
from offbeat.errors import ConfigurationError
from offbeat.methods import Method, method_named
from offbeat.records.ledger import Entry, Ledger, Place, lags_of
from offbeat.schedules.timeline import Costs, Timeline, timeline

MOST_ACTIONS = 10_000
"""Actions of a run on a page; the trace has all of them."""
_MOST_STAGES = 256
_NO_LOSS = float("nan")


def planned_entries(line: Timeline) -> list[Entry]:
    """Modelled actions with the versions they read and write."""
    versions = [0] * line.stages
    entries = []
    for (stage, kind, batch, version), start, end in line.spans:
        versions[stage] += kind == "U"
        read = versions[stage] if version is None else version
        entries.append(Entry(kind, stage, batch, read, start, end, _NO_LOSS))
    return entries


def plan(run: Facts) -> tuple[Timeline, Timeline | None]:
    """The modelled timeline of a run's method, a few steps beyond the fill: with equal stages, and
    with what its own stages cost, where the ledger says it.

    Raises :class:`ConfigurationError`, and nothing else, where the method cannot be built again.
    """
    method, stages = run.method, run.stages
    if method is None or stages is None:
        raise ConfigurationError("the configuration does not name a method and its stages.")
    if stages > _MOST_STAGES:
        raise ConfigurationError(f"{stages} stages are too many to draw.")
    try:
        built = method_named(method, **run.settings)
        steps = built.schedule(stages).fill_steps + 6
        # A hybrid's ledger ends with another method.
        ledger = Ledger() if run.config.get("hybrid") else run.ledger or Ledger()
        costs = costs_of(ledger, built, stages)
        own = None if costs is None else timeline(built, stages, steps=steps, costs=costs)
        return timeline(built, stages, steps=steps), own
    except Exception as error:  # a stored file may hold anything
        raise ConfigurationError(str(error) or type(error).__name__) from error


def costs_of(ledger: Ledger, method: Method, stages: int) -> Costs | None:
    """What a batch cost each stage, in seconds: medians, its update with the backward.

    None unless all stages have some.
    """
    schedule, each = method.schedule(stages), range(stages)
    times: dict[tuple[str, int], list[float]] = {(k, stage): [] for k in "FBU" for stage in each}
    for e in ledger:
        if (e.kind, e.stage) in times:
            times[e.kind, e.stage].append(e.end_s - e.start_s)
    if not all(times.values()):
        return None
    forward, backward = ([median(times[kind, stage]) for stage in each] for kind in "FB")
    for stage in each:
        if method.rule == "recompute" and schedule.in_flight(stage):
            backward[stage] = max(0.0, backward[stage] - forward[stage])
        backward[stage] += median(times["U", stage]) / schedule.micro_batches
    share = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
    if not min(share) > 0:
        return None
    scale = schedule.micro_batches / stages
    ahead, back = scale * sum(forward), scale * sum(backward)
    return Costs(forward=ahead, recompute=ahead, backward=back, share=share)


@dataclass(frozen=True)
class Drawing:
    """Lines of actions over time, as the page's script reads them."""

    entries: Sequence[Entry]
    left_out: int
    unit: str
    """``s``, or empty for modelled time."""

    @property
    def lines(self) -> list[str]:
        """Their names: per stage of a replica one for its actions, and one for averages."""
        several = len({entry.replica for entry in self.entries}) > 1
        return [
            (f"r{replica} " if several else "") + (f"avg {stage}" if average else f"stage {stage}")
            for replica, stage, average in self._lines
        ]

    @property
    def _lines(self) -> list[tuple[int, int, bool]]:
        return sorted({_line(entry) for entry in self.entries})

    def columns(self) -> dict[str, Any]:
        """Column by column, because that is a third of the size of records."""
        places = {line: place for place, line in enumerate(self._lines)}
        zero = min((entry.start_s for entry in self.entries), default=0.0)
        lags = lags_of(self.entries)
        read = {(e.replica, e.stage, e.batch): e.version for e in self.entries if e.kind == "F"}
        return {
            "unit": self.unit,
            "lines": self.lines,
            "line": [places[_line(entry)] for entry in self.entries],
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


def _of_batch(entry: Entry, numbers: Mapping[Place, int]) -> int | None:
    if entry.kind not in ("F", "B"):
        return None
    return numbers.get((entry.replica, entry.stage, entry.batch))


def _line(entry: Entry) -> tuple[int, int, bool]:
    return entry.replica, entry.stage, entry.kind == "A"


def measured(ledger: Ledger) -> Drawing:
    """The last actions of a ledger; averages under way have lines of their own."""
    entries = sorted(ledger, key=lambda entry: entry.end_s)[-MOST_ACTIONS:]
    return Drawing(entries, len(ledger) - len(entries), "s")


def planned(line: Timeline, unit: str = "") -> Drawing:
    entries = sorted(planned_entries(line), key=lambda entry: entry.start_s)
    return Drawing(entries[:MOST_ACTIONS], len(entries[MOST_ACTIONS:]), unit)


def timelines(cases: Sequence[Case], drawings: list[Drawing]) -> Markup:
    """Adds to ``drawings`` what the page's script draws, in the order of its figures."""
    hint = (
        "An arrow leads from a batch's forward to its backward at the same stage, and says how many"
        " updates were made between. Click or tap an action for its details and its batch's arrows;"
        " drag to move, pinch or use the buttons to zoom. The wheel zooms once a timeline has been"
        " clicked."
    )
    kinds = (("F", "forward"), ("B", "backward"), ("U", "update"), ("A", "averages"))
    key = (tag("span", tag("i", class_=f"box {kind}"), word) for kind, word in kinds)

    def both(run: Facts) -> Markup:
        return join([_measured(run, drawings), _planned(run, drawings)])

    return join([note(hint), tag("p", *key, class_="key"), per_case(cases, both, _rates)])


def _rates(run: Facts) -> str:
    return "" if run.step_s is None else f"{words.seconds(run.step_s)} a step"


def _measured(run: Facts, drawings: list[Drawing]) -> Markup:
    if run.ledger is None:
        return note("No ledger was kept, or it cannot be read: there is no measured timeline.")
    drawing = measured(run.ledger)
    told = f"{len(drawing.entries):,} actions"
    if drawing.left_out:
        told = f"the last {told}; {drawing.left_out:,} earlier ones are in the trace only"
    if run.in_turn:
        told += "; in one process stages take turns, so only one works at a time"
    return _timeline("Measured", told, run, drawing, drawings)


def _planned(run: Facts, drawings: list[Drawing]) -> Markup:
    try:
        equal, own = plan(run)
    except ConfigurationError as error:
        return note(f"The planned timeline is left out: {error}")
    line = own or equal
    told = f"messages are free. Busy {line.busy_share:.0%}, ideal speed-up {line.speed_up:.2f}"
    if own is None:
        told = f"with equal stages: a batch's forward takes 1, its backward 2; {told}"
    else:
        told = f"with what this run's stages took, by the median; {told}"
        told += f"; {equal.speed_up:.2f}, were all stages equal"
    if run.config.get("hybrid"):  # one method after the other
        told = f"of the first phase, {told}"
    return _timeline("Planned", told, run, planned(line, "s" if own else ""), drawings)


def _timeline(
    kind: str, told: str, run: Facts, drawing: Drawing, drawings: list[Drawing]
) -> Markup:
    drawings.append(drawing)
    buttons = [
        tag("button", sign, type="button", data_do=word, title=help_, aria_label=help_)
        for word, sign, help_ in (
            ("in", "+", "Zoom in"),
            ("out", "\N{MINUS SIGN}", "Zoom out"),
            ("left", "\N{LEFTWARDS ARROW}", "Earlier"),
            ("right", "\N{RIGHTWARDS ARROW}", "Later"),
            ("all", "all", "Show everything"),
        )
    ]
    keys = "Left and right go from action to action, up and down to other lines, + and - zoom."
    hint = f"{kind} timeline of {run.label}. {keys}"
    canvas = tag("canvas", tabindex="0", role="application", aria_label=hint)
    return tag(
        "figure",
        tag("figcaption", kind, tag("span", f" {told}", class_="note")),
        tag("div", *buttons, tag("span", class_="range"), class_="controls"),
        canvas,
        tag("div", "No action chosen yet.", class_="details", role="status"),
        class_="timeline",
        data_timeline=len(drawings) - 1,
    )
