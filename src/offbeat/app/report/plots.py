"""The report's figures as matplotlib draws them: the same facts as the page, for papers."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from offbeat.app.report.actions import plan
from offbeat.app.report.facts import Facts, Point, facts_of
from offbeat.app.report.figures import draw_curves, draw_timelines, empty_figure
from offbeat.app.report.parts import place
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError
from offbeat.schedules.timeline import Timeline, measured_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOXES = 40
"""Typical forwards and backwards that fit into the width of a timeline."""
_WEIGHTS, _IN_FLIGHT, _CORRECTIONS = "#0072B2", "#E69F00", "#009E73"


def figures_of(runs: Sequence[Run]) -> dict[str, "Figure"]:
    """Every figure that the runs have data for, by file name."""
    facts = facts_of(runs)
    drawn = {
        "training-loss": _curves(facts, "training_loss", "training loss"),
        "test-loss": _curves(facts, "test_loss", "test loss"),
        "test-accuracy": _curves(facts, "test_accuracy", "test accuracy, %", 100.0),
        "timeline-measured": _timelines(_measured(facts), "seconds from the middle of the run on"),
        "timeline-planned": _timelines(_planned(facts), "modelled time, in forwards of a stage"),
        "lags": _lags({f.label: f.lag_counts for f in facts if f.lag_counts}),
        "memory": _memory([f for f in facts if f.memory]),
        "waits": _waits([f for f in facts if f.waits]),
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


def _lags(counts: Mapping[str, Mapping[int, Mapping[int, int]]]) -> "Figure | None":
    """A row of panels per run, a panel per stage."""
    if not counts:
        return None
    stages = 1 + max(stage for of_run in counts.values() for stage in of_run)
    most = max(lag for of_run in counts.values() for c in of_run.values() for lag in c)
    figure = empty_figure(max(5.0, 2.0 * stages), 0.6 + 1.9 * len(counts))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(counts), stages, sharex=True, squeeze=False)
    for row, (label, of_run) in zip(panels, counts.items(), strict=True):
        for stage, axes in enumerate(row):
            of_stage = of_run.get(stage, {})
            axes.set_visible(stage in of_run)
            axes.bar(list(of_stage), list(of_stage.values()), width=0.8, color=_WEIGHTS)
            axes.set_title(f"stage {stage}", fontsize=10)
            axes.set_xlim(-0.6, most + 0.6)
            _tidy(axes)
        row[0].set_ylabel(_plain(label), fontsize=10)
    figure.supxlabel("lag in updates; height: micro-batches", fontsize=11)
    return figure


def _memory(facts: Sequence[Facts]) -> "Figure | None":
    parts = (
        ("weight_bytes", "weights", _WEIGHTS),
        ("in_flight_bytes", "in flight", _IN_FLIGHT),
        ("correction_bytes", "corrections, monitor", _CORRECTIONS),
    )
    bars = {
        run.label: {
            place(run, entry.replica, entry.stage): [
                entry.fields.get(key, 0.0) / 1e6 for key, _, _ in parts
            ]
            for entry in run.memory
        }
        for run in facts
    }
    return _bars(
        bars, [(word, colour) for _, word, colour in parts], "MB held before the last drain"
    )


def _waits(facts: Sequence[Facts]) -> "Figure | None":
    bars = {
        run.label: {place(run, wait.replica, wait.stage): [wait.total_s] for wait in run.waits}
        for run in facts
    }
    return _bars(bars, [("waiting", _IN_FLIGHT)], "seconds of waiting for averages")


def _bars(
    bars: Mapping[str, Mapping[str, Sequence[float]]],
    parts: Sequence[tuple[str, str]],
    xlabel: str,
) -> "Figure | None":
    """A panel per run, a horizontal bar per place, stacked from its parts."""
    if not bars:
        return None
    heights = [len(of_run) for of_run in bars.values()]
    figure = empty_figure(9.5, 0.8 + sum(0.5 + 0.28 * height for height in heights))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(bars), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (label, of_run) in zip(panels[:, 0], bars.items(), strict=True):
        left = [0.0] * len(of_run)
        for part, (word, colour) in enumerate(parts):
            widths = [values[part] for values in of_run.values()]
            axes.barh(list(of_run), widths, left=left, color=colour, label=word)
            left = [low + width for low, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_title(_plain(label), loc="left", fontsize=11)
        _tidy(axes)
    # Of all panels, once all are drawn; where every bar is empty the axis would go below zero.
    panels[-1, 0].set_xlim(left=0)
    panels[-1, 0].set_xlabel(xlabel, fontsize=11)
    if len(parts) > 1:
        handles, names = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=11)
    return figure


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
