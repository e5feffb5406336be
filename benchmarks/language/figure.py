"""Draws the gaps to BP: against the delay per optimizer, and way by way for lag 1 and more.

Whatever was run at several learning rates is drawn at the one with which it ended lowest.

python -m benchmarks.language.figure benchmarks/language/results.jsonl
"""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pictures
from benchmarks.language.configurations import BASELINE, SETS, WAYS
from benchmarks.language.run import rows_in
from benchmarks.language.summary import (
    CURVE,
    TARGET,
    Found,
    best_of_rates,
    found_in,
    settings_of,
)
from benchmarks.pictures import INK, plain
from benchmarks.stored import Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette.
LOOKS = {
    "sgd": ("#999999", "v"),
    "adamw": ("#D55E00", "o"),
    "adamw .99": ("#E69F00", "s"),
    "nadamw .99": ("#009E73", "^"),
    "muon": ("#0072B2", "D"),
}
LINEAR = 0.01
"""Nats around zero that are drawn in proportion where larger gaps are drawn as logarithms."""


def draw(rows: Sequence[Row]) -> Figure:
    found = {name: _drawable(best_of_rates(found_in(rows, of))) for name, of in SETS.items()}
    target = found["target"] + found["between"]
    heights = [3.2, 0.9 + 0.22 * _lines(target), 0.9 + 0.22 * _lines(found["lag"])]
    figure = Figure(figsize=(8.5, sum(heights)), layout="constrained")
    curve, above, below = figure.subplots(3, 1, height_ratios=heights)
    draw_curve(curve, found[CURVE])
    draw_ways(above, target, "A lag of at most 1 (M=8 and more), 2 (M=4), 4 (M=2)")
    above.axvline(TARGET, color=INK, linewidth=0.8, linestyle="--")
    above.set_xscale("symlog", linthresh=LINEAR)
    draw_ways(below, found["lag"], "An update per batch: lag up to 7 (1F1B) and 14 (stale)")
    below.set_xlabel("validation loss minus BP's, nats (bars: 95 % intervals)")
    return figure


def _drawable(found: Sequence[Found]) -> list[Found]:
    """Without BP itself, and without what has no gap or diverged."""
    return [summary for summary in found if summary.way != BASELINE and math.isfinite(summary.gap)]


def _lines(found: Sequence[Found]) -> int:
    return len({summary.way for summary in found})


def draw_curve(axes: Axes, found: Sequence[Found]) -> None:
    for optimizer, (colour, marker) in LOOKS.items():
        mine = sorted(
            (summary for summary in found if summary.optimizer == optimizer),
            key=lambda summary: max(summary.lags),
        )
        if mine:
            axes.errorbar(
                [max(summary.lags) for summary in mine],
                [summary.gap for summary in mine],
                [summary.half or 0.0 for summary in mine],
                color=colour,
                marker=marker,
                capsize=2,
                linewidth=1.2,
                label=optimizer,
            )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_title("The same delay for all weights", loc="left", fontsize=11)
    axes.set_xlabel("delay, updates")
    axes.set_ylabel("loss minus BP's, nats")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    plain(axes)


def draw_ways(axes: Axes, found: Sequence[Found], title: str) -> None:
    ways = [way for way in WAYS if any(summary.way == way for summary in found)][::-1]
    optimizers = [name for name in LOOKS if any(s.optimizer == name for s in found)]
    for number, optimizer in enumerate(optimizers):
        colour, marker = LOOKS[optimizer]
        shift = 0.2 * (number - (len(optimizers) - 1) / 2)
        mine = [summary for summary in found if summary.optimizer == optimizer]
        axes.errorbar(
            [summary.gap for summary in mine],
            [ways.index(summary.way) - shift for summary in mine],
            xerr=[summary.half or 0.0 for summary in mine],
            fmt=marker,
            color=colour,
            capsize=2,
            markersize=5,
            label=optimizer,
        )
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(ways)), ways, fontsize=8)
    axes.set_title(title, loc="left", fontsize=11)
    if optimizers:
        axes.legend(frameon=False, fontsize=8)
    plain(axes)


def draw_stored(path: Path) -> Figure:
    rows = rows_in(path)
    if not rows:
        raise SystemExit(f"{path}: no runs.")
    return draw(settings_of(rows)[0])


if __name__ == "__main__":
    pictures.command(draw_stored, __doc__, dpi=110)
