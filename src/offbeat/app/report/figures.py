"""Pictures that matplotlib draws: of a study, and for scripts; a page draws its own.

Only ``matplotlib.figure`` is used, never pyplot: no window, no global state, and a figure that
nobody keeps is freed.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbeat.app.study import Cell
from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.schedules.table import Span
from offbeat.schedules.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
) -> "Figure":
    """One panel per method over a common time axis: who works when, and who waits.

    Boxes are forwards and backwards with their (micro-)batch number where it fits. ``until`` ends
    the axis early, so that the boxes of a long run stay legible; by default everything is shown.
    """
    _refuse_empty(timelines, "draw_timelines")
    end = until if until is not None else max(line.duration for line in timelines.values())
    panel_in = [_TITLE_IN + _LINE_IN * line.stages for line in timelines.values()]
    height = _TOP_IN + sum(panel_in) + _BOTTOM_IN
    figure = _empty_figure(_WIDTH_IN, height)
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
) -> "Figure":
    """One line per run through its (epoch, value) points; the legend stands beside the axes.

    ``log``: for errors, whose ends are all small.
    """
    _refuse_empty(runs, "draw_curves")
    figure = _empty_figure(9.5, 4.8)
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


_ASIDE = 0.04
"""By how much a method stands beside the next, so that those of the same lag can be told apart."""


def draw_study(cells: Sequence[Cell], percent: bool) -> "Figure":
    """Each configuration at the lag of its first stage, every seed a dot, the mean a marker."""
    figure = _empty_figure(8.5, 5.0)
    figure.set_layout_engine("constrained")  # makes room for a legend outside
    axes = figure.add_subplot()
    scale = 100.0 if percent else -1.0  # a loss is stored as a score, negative
    plain = [cell for cell in cells if cell.method == "synchronous"]
    for cell in plain:
        axes.axhline(scale * cell.mean, color="#000000", linewidth=1)
        low, high = min(cell.scores), max(cell.scores)
        axes.axhspan(scale * low, scale * high, color="#000000", alpha=0.08, linewidth=0)
    others = [cell for cell in cells if cell.method != "synchronous"]
    methods = list(dict.fromkeys(cell.method for cell in others))
    for place, method in enumerate(methods):
        mine = sorted((c for c in others if c.method == method), key=lambda c: max(c.lags))
        # Black is plain training's.
        colour, marker = _PALETTE[(place + 1) % len(_PALETTE)], _MARKERS[place % len(_MARKERS)]
        aside = _ASIDE * (place - (len(methods) - 1) / 2)
        lags = [max(cell.lags) + aside for cell in mine]
        axes.plot(lags, [scale * c.mean for c in mine], color=colour, marker=marker, label=method)
        for lag, cell in zip(lags, mine, strict=True):
            axes.plot([lag] * len(cell.scores), [scale * s for s in cell.scores], ".", color=colour,
                      alpha=0.4)  # fmt: skip
    axes.set_xlabel("lag of the first stage, in updates")
    axes.set_ylabel("test accuracy, %" if percent else "test loss, better upwards")
    if not percent:
        axes.invert_yaxis()
    axes.set_title("line and band: BP, mean and range over seeds" if plain else "")
    axes.grid(alpha=0.3)
    axes.locator_params(axis="x", integer=True)
    if others:
        figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def _empty_figure(width_in: float, height_in: float) -> "Figure":
    """A figure outside pyplot; says what to install where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "drawing needs matplotlib, which is missing: pip install matplotlib"
        ) from error
    return Figure(figsize=(width_in, height_in), dpi=150)


def _refuse_empty(given: Mapping[str, object], name: str) -> None:
    if not given:
        raise ConfigurationError(f"{name}() got nothing to draw: give at least one entry.")
