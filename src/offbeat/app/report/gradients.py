"""What the guards saw: how large gradients were, and which updates were dropped or clipped."""

from collections.abc import Sequence

from offbeat.app.report import words
from offbeat.app.report.facts import AtStage, Facts
from offbeat.app.report.markup import Markup, join, table
from offbeat.app.report.parts import note, per_run, place

_COLUMNS = {
    "updates": "updates",
    "median_norm": "norm, median",
    "largest_norm": "norm, largest",
    "clipped": "clipped",
    "not_finite": "not finite",
    "skipped": "skipped",
    "rolled_back": "rolled back",
    "largest_lag": "lag, largest",
}


def gradients(facts: Sequence[Facts]) -> Markup:
    text = (
        "The norm of all gradients of a stage together, before clipping, at every update. One that"
        " is not finite is applied, skipped or rolled back, as the run's guard was told to; the"
        " largest norm is that of the finite ones."
    )
    return join([note(text), per_run(facts, _of_run)])


def _of_run(run: Facts) -> Markup:
    if not run.guarded:
        return note("This run had no guards.")
    body = [
        (place(run, of.replica, of.stage), *(_words(of, name) for name in _COLUMNS))
        for of in run.guarded
    ]
    return table("Gradients, per stage", ("stage", *_COLUMNS.values()), body, class_="numbers")


def _words(of: AtStage, name: str) -> str:
    return words.number(of.numbers.get(name))
