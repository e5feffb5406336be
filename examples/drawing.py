"""The demo's pictures, by matplotlib: curves of runs, and timelines one below the other."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from offbeat.schedules.table import Span
from offbeat.schedules.timeline import Timeline

# Okabe and Ito's palette, told apart by colour-blind readers; dark enough for lines on white.
_PALETTE = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MARKED = 40
"""Points up to which each has a marker; on a longer line they would hide it."""
_KINDS = {"F": ("forward", "#56B4E9"), "B": ("backward (and recomputation)", "#E69F00")}

_INCH_PT = 72.0
_NUMBER_PT = 7.5
_WIDTH_IN, _LEFT_IN, _RIGHT_IN = 11.0, 0.85, 0.2
_LINE_IN, _TITLE_IN, _TOP_IN, _BOTTOM_IN = 0.24, 0.42, 0.15, 0.55


def draw_timelines(
    timelines: Mapping[str, Timeline], *, until: float | None = None, xlabel: str = "modelled time"
) -> Figure:
    """One panel per method over a common time axis: who works when, and who waits.

    Boxes are forwards and backwards with their (micro-)batch number where it fits. ``until`` ends
    the axis early, so that the boxes of a long run stay legible; by default everything is shown.
    """
    end = until if until is not None else max(line.duration for line in timelines.values())
    panel_in = [_TITLE_IN + _LINE_IN * line.stages for line in timelines.values()]
    height = _TOP_IN + sum(panel_in) + _BOTTOM_IN
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=150)
    top = height - _TOP_IN
    width = _WIDTH_IN - _LEFT_IN - _RIGHT_IN
    for (name, line), panel in zip(timelines.items(), panel_in, strict=True):
        lines_in = _LINE_IN * line.stages
        box = (_LEFT_IN / _WIDTH_IN, (top - panel) / height, width / _WIDTH_IN, lines_in / height)
        axes = figure.add_axes(box)
        _draw_panel(axes, line, end, unit_pt=width * _INCH_PT / end)
        rates = f"busy {line.busy_share:.0%}, speed-up {line.speed_up:.2f}"
        axes.set_title(f"{name}: {rates}", loc="left", fontsize=11, pad=4)
        top -= panel
    for axes in figure.axes[:-1]:
        axes.tick_params(labelbottom=False)
    figure.axes[-1].set_xlabel(xlabel, fontsize=11)
    kinds = figure.axes[0].get_legend_handles_labels()
    figure.legend(*kinds, loc="upper right", ncols=2, frameon=False, fontsize=11)
    return figure


def _draw_panel(axes: Any, line: Timeline, end: float, unit_pt: float) -> None:
    for kind, (name, colour) in _KINDS.items():
        for stage in range(line.stages):
            boxes = [
                (span.start, span.end - span.start)
                for span in line.spans
                if (span.action.kind, span.action.stage) == (kind, stage) and span.start < end
            ]
            low_and_height, name_once = (stage - 0.42, 0.84), None if stage else name
            axes.broken_barh(boxes, low_and_height, facecolor=colour, edgecolor="white",
                             linewidth=0.5, label=name_once)  # fmt: skip
    for span in line.spans:
        if span.action.kind != "U" and span.end <= end and _fits(span, unit_pt):
            axes.text(
                (span.start + span.end) / 2,
                span.action.stage + 0.03,
                str(span.action.batch),
                ha="center",
                va="center_baseline",
                fontsize=_NUMBER_PT,
            )
    axes.set_xlim(0, end)
    axes.set_ylim(line.stages - 0.5, -0.5)
    axes.set_yticks(range(line.stages), [f"stage {k}" for k in range(line.stages)], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _fits(span: Span, unit_pt: float) -> bool:
    """Whether a box is wide enough for its number; updates take no time and have no box."""
    digits = len(str(span.action.batch))
    return (span.end - span.start) * unit_pt > (0.64 * digits + 0.2) * _NUMBER_PT


def draw_curves(
    runs: Mapping[str, Sequence[tuple[float, float]]],
    *,
    ylabel: str = "test accuracy",
    xlabel: str = "epoch",
    title: str = "",
    log: bool = False,
) -> Figure:
    """One line per run through its (epoch, value) points; the legend stands beside the axes.

    ``log``: for errors, whose ends are all small.
    """
    figure = Figure(figsize=(9.5, 4.8), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for place, (name, points) in enumerate(runs.items()):
        axes.plot(
            [epoch for epoch, _ in points],
            [value for _, value in points],
            label=name,
            color=_PALETTE[place % len(_PALETTE)],
            linestyle=_DASHES[place % len(_DASHES)],
            marker=_MARKERS[place % len(_MARKERS)] if len(points) <= _MARKED else None,
            # Earlier lines are broader, so that one which a later line covers still shows.
            linewidth=max(1.5, 3.0 - 0.3 * place),
            markersize=max(4.5, 8 - 0.7 * place),
        )
    axes.locator_params(axis="x", integer=True)
    if log:
        axes.set_yscale("log", subs=[2, 5])  # more would write their numbers over one another
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(xlabel, fontsize=11)
    axes.set_ylabel(ylabel, fontsize=11)
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=11, handlelength=3)
    return figure
