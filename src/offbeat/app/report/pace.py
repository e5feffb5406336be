"""Who sets the pace: what a batch costs each stage, the straggler among them, and its price."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from offbeat.app.report import words
from offbeat.app.report.cases import Case, per_case
from offbeat.app.report.facts import AtStage, Facts
from offbeat.app.report.markup import Markup, bar, join, note, place, table
from offbeat.records.ledger import Entry

LEVEL = 1.1
"""A stage that takes less than this times the mean is no straggler."""


@dataclass(frozen=True)
class Pace:
    """What a batch costs every stage of every replica, in seconds."""

    work: dict[tuple[int, int], float]

    @classmethod
    def of(cls, entries: Iterable[Entry] | None) -> "Pace | None":
        """From a ledger; None where there are not two updates of every stage."""
        times: dict[tuple[int, int], dict[str, list[float]]] = {}
        for e in entries or ():
            if e.kind in "FBU":
                kinds = times.setdefault((e.replica, e.stage), {"F": [], "B": [], "U": []})
                kinds[e.kind].append(e.end_s - e.start_s)
        if not times or any(len(kinds["U"]) < 2 for kinds in times.values()):
            return None
        return cls({where: _batch(times[where]) for where in sorted(times)})

    @property
    def slowest(self) -> tuple[int, int]:
        return max(self.work, key=lambda where: self.work[where])

    @property
    def mean_s(self) -> float:
        return fmean(self.work.values())

    @property
    def excess(self) -> float:
        """By which share the slowest stage takes longer than the mean one; the pace of a full pipe
        suffers by as much."""
        return self.work[self.slowest] / self.mean_s - 1 if self.mean_s > 0 else 0.0

    @property
    def has_straggler(self) -> bool:
        return len(self.work) > 1 and 1 + self.excess > LEVEL


def _batch(kinds: dict[str, list[float]]) -> float:
    """Medians, times how often each happens per update: parts of a batch count together."""
    updates = len(kinds["U"])
    return sum(median(of) * round(len(of) / updates) for of in kinds.values() if of)


def straggler_in_words(run: Facts, pace: Pace) -> str:
    if not pace.has_straggler:
        return "No stage holds the others up: the slowest takes" + (
            f" {words.seconds(pace.work[pace.slowest])} for a batch, the mean"
            f" {words.seconds(pace.mean_s)}."
        )
    text = (
        f"{place(run, *pace.slowest).capitalize()} is the straggler: a batch takes it"
        f" {words.seconds(pace.work[pace.slowest])}, the mean stage {words.seconds(pace.mean_s)}."
        f" Side by side, no step can be shorter than that, so it costs"
        f" {words.percent(pace.excess)} of the time that equal stages would need"
    )
    replica, stage = pace.slowest
    twins = [cost for (r, k), cost in pace.work.items() if k == stage and r != replica]
    if twins and pace.work[pace.slowest] > LEVEL * fmean(twins):
        return f"{text}. The same stage is faster in other replicas: look at its machine."
    return f"{text}. Cut elsewhere (--cuts), or make that stage cheaper."


def waiting(cases: Sequence[Case]) -> Markup:
    runs = [run for case in cases for run in case.runs]
    longest = max((_waited(wait) for run in runs for wait in run.waits), default=0.0)

    def part(run: Facts) -> Markup:
        return join([_pace(run), _busy(run), _waits(run, longest or 1.0)])

    return per_case(cases, part, _digest)


def _digest(run: Facts) -> str:
    pace = Pace.of(run.ledger)
    text = f"busy {words.listed([f'{share:.0%}' for share in run.busy_share])}"
    if pace is not None and pace.has_straggler:
        text += f"; straggler: {place(run, *pace.slowest)}, +{pace.excess:.0%}"
    return text


def _pace(run: Facts) -> Markup:
    pace = Pace.of(run.ledger)
    if pace is None:
        return note("No ledger says what a batch costs each stage, so no straggler can be named.")
    most = max(pace.work.values()) or 1.0
    body = [
        (
            place(run, *where),
            bar(cost / most, "wait" if pace.has_straggler and where == pace.slowest else ""),
            words.seconds(cost),
            f"{cost / pace.mean_s - 1:+.0%}" if pace.mean_s > 0 else words.MISSING,
        )
        for where, cost in pace.work.items()
    ]
    head = ("stage", "", "work", "against the mean")
    shown = table("Work of a batch, per stage", head, body, class_="bars")
    return join([note(straggler_in_words(run, pace)), shown])


def _busy(run: Facts) -> Markup:
    if not run.busy_share:
        return note("No busy shares were recorded.")
    body = [
        (f"stage {stage}", bar(share), words.percent(share))
        for stage, share in enumerate(run.busy_share)
    ]
    shown = table("Part of the time each stage worked", ("stage", "", "busy"), body, class_="bars")
    return join([shown, note(_IN_TURN) if run.in_turn else None])


_IN_TURN = (
    "All stages ran in one process and took turns: together these shares are at most 100 %. Under"
    " torchrun they overlap."
)


def _waits(run: Facts, longest: float) -> Markup:
    if not run.waits and run.replicas == 1:
        return note("One replica: there are no averages to wait for.")
    if not run.waits:
        return note("No waits for averages were recorded.")
    body = [
        (
            place(run, wait.replica, wait.stage),
            bar(_waited(wait) / longest, "wait"),
            words.seconds(_waited(wait)),
            words.seconds(wait.numbers.get("longest_s", 0.0)),
            f"{wait.numbers.get('averages', 0):,.0f}",
        )
        for wait in run.waits
    ]
    head = ("stage", "", "in all", "longest", "averages")
    return table("Standing still until an average arrived", head, body, class_="bars")


def _waited(wait: AtStage) -> float:
    return wait.numbers.get("total_s", 0.0)
