"""Curves and timelines once more, as files for papers: the page's own cannot leave the page."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from offbeat.app.report.actions import plan
from offbeat.app.report.facts import Facts, Point, facts_of
from offbeat.app.report.figures import draw_curves, draw_timelines
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError
from offbeat.schedules.timeline import Timeline, measured_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOXES = 40
"""Typical forwards and backwards that fit into the width of a timeline."""


def figures_of(runs: Sequence[Run]) -> dict[str, "Figure"]:
    """Every curve and timeline that the runs have data for, by file name."""
    facts = facts_of(runs)
    drawn = {
        "training-loss": _curves(facts, "training_loss", "training loss"),
        "test-loss": _curves(facts, "test_loss", "test loss"),
        "test-accuracy": _curves(facts, "test_accuracy", "test accuracy, %", 100.0),
        "timeline-measured": _timelines(_measured(facts), "seconds from the middle of the run on"),
        "timeline-planned": _timelines(_planned(facts), "modelled time, in forwards of a stage"),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _plain(text: str) -> str:
    """A name as matplotlib must get it: no formulas, no hidden legend entries, no controls."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _curves(facts: Sequence[Facts], key: str, ylabel: str, scale: float = 1.0) -> "Figure | None":
    curves: dict[str, Sequence[Point]] = {run.label: getattr(run, key) for run in facts}
    by_epoch = all(p.epoch is not None for points in curves.values() for p in points)
    lines = {
        _plain(label): [
            (x, scale * p.value)
            for p in points
            if (x := p.epoch if by_epoch else p.time_s) is not None
        ]
        for label, points in curves.items()
    }
    lines = {label: points for label, points in lines.items() if points}
    xlabel = "epoch" if by_epoch else "seconds"
    return draw_curves(lines, ylabel=ylabel, xlabel=xlabel) if lines else None


def _measured(facts: Sequence[Facts]) -> dict[str, Timeline]:
    found = {}
    for run in facts:
        if run.ledger is not None:
            try:
                found[_plain(run.label)] = measured_timeline(run.ledger).from_middle()
            except (ConfigurationError, ZeroDivisionError):  # averages only, or no time at all
                continue
    return found


def _planned(facts: Sequence[Facts]) -> dict[str, Timeline]:
    found = {}
    for run in facts:
        try:
            found[_plain(run.label)] = plan(run.method, run.settings, run.stages)
        except ConfigurationError:
            continue
    return found


def _timelines(lines: Mapping[str, Timeline], xlabel: str) -> "Figure | None":
    """The beginning, as far as single boxes can be told apart."""
    lengths = [
        span.end - span.start
        for line in lines.values()
        for span in line.spans
        if span.end > span.start and span.action.kind != "U"
    ]
    if not lengths:
        return None
    whole = max(line.duration for line in lines.values())
    return draw_timelines(lines, until=min(whole, _BOXES * median(lengths)), xlabel=xlabel)
