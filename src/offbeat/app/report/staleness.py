"""What the monitor read: how stale each stage was, and what its gradients were still worth."""

from collections.abc import Sequence
from statistics import median

from offbeat.app.report import words
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, join, table
from offbeat.app.report.parts import note, per_run, place
from offbeat.records.readings import WHATS, What

_HEADS: dict[What, str] = {
    "staleness": "staleness, median",
    "prediction": "prediction error as a share of none",
    "cosine": "cosine of stale and fresh gradients",
}
"""What a column is called, where the reading's own name would not do."""


def staleness(facts: Sequence[Facts]) -> Markup:
    text = (
        "How stale a stage is: lr / (1 - momentum) x curvature x lag. On a quadratic without"
        " noise, staleness does little below 0.1, weight prediction helps up to 1, and beyond that"
        " plain momentum is near its limit. Here the curvature is read off gradients of different"
        " batches, whose noise counts as well: the number is easily several times too high. Compare"
        " stages and runs by it; what a run can take, its loss says."
    )
    return join([note(text), per_run(facts, _of_run)])


def _of_run(run: Facts) -> Markup:
    if not run.readings:
        return note("This run had no monitor.")
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for reading in run.readings:
        of_stage = found.setdefault((reading.replica, reading.stage), {})
        of_stage.setdefault(reading.what, []).append(reading.value)
    body = [
        (place(run, replica, stage), *(_middle(values.get(what)) for what in WHATS),
         words.number(max(values["staleness"])) if "staleness" in values else words.MISSING)
        for (replica, stage), values in sorted(found.items())
    ]  # fmt: skip
    head = ("stage", *(_HEADS.get(what, what) for what in WHATS), "staleness, largest")
    return table("How stale, per stage", head, body, class_="numbers")


def _middle(values: list[float] | None) -> str:
    return words.MISSING if values is None else words.number(median(values))
