"""Draws a step's time, and its increase, against the slow-down: one line per method.

python -m benchmarks.stragglers.figure benchmarks/stragglers/results.jsonl
"""

from statistics import fmean
from typing import Any

from benchmarks import pictures
from benchmarks.stored import read_result
from benchmarks.stragglers.summary import Lines, increases_of, times_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette; the three DSPs are one hue, darker with more slack.
STYLES: dict[str, tuple[str, str]] = {
    "Synchronous": ("#000000", "o"),
    "GPipe": ("#E69F00", "s"),
    "FeaturesReplay": ("#009E73", "^"),
    "ADL M=4": ("#D55E00", "D"),
    "ADL M=1": ("#CC79A7", "v"),
    "DSP hop 1": ("#9ECAE8", "P"),
    "DSP hop 2": ("#4292C6", "P"),
    "DSP hop 3": ("#084594", "P"),
}

TICKS_MS = (60, 80, 100, 150, 200, 300, 400)


def draw(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    times, increases = times_of(result), increases_of(result)
    _draw_lines(left, times)
    left.set_yscale("log")
    left.set_yticks(TICKS_MS, TICKS_MS)
    left.set_yticks([], minor=True)
    left.set_ylabel("mean time per step, ms (log axis)")
    left.set_title("What a user pays", loc="left")
    _draw_lines(right, increases)
    most = max(row["slowdown"] for row in result["runs"])
    floor = 100 * result["setting"]["probability"] * most
    right.plot([0, 100 * most], [0, floor], "--", color="#777777", label="floor: a third")
    right.set_ylim(bottom=0)
    right.set_ylabel("increase of it over the method without faults, %")
    right.set_title("What faults add to it", loc="left")
    _add_legend(left, {name: fmean(line[most]) for name, line in times.items()})
    ends = {name: fmean(line[most]) for name, line in increases.items()}
    _add_legend(right, ends | {"floor: a third": floor})
    compute = "sleeping" if result["setting"]["work"]["compute"] == "sleep" else "computing"
    figure.suptitle(f"Every (stage, step) slowed with probability 1/3; 4 {compute} processes")
    return figure


def _draw_lines(axes: Axes, lines: Lines) -> None:
    """Means over seeds, with bars from the lowest to the highest."""
    for name, line in lines.items():
        colour, marker = STYLES[name]
        means = {by: fmean(values) for by, values in sorted(line.items())}
        spread = [
            [mean - min(line[by]) for by, mean in means.items()],
            [max(line[by]) - mean for by, mean in means.items()],
        ]
        axes.errorbar(
            [100 * by for by in means],
            list(means.values()),
            yerr=spread,
            color=colour,
            marker=marker,
            markersize=5,
            capsize=3,
            linewidth=1.5,
            label=name,
        )
    axes.set_xlabel("slow-down of a slowed stage, %")
    axes.set_xticks(sorted({0.0} | {100 * by for line in lines.values() for by in line}))
    axes.grid(alpha=0.3)


def _add_legend(axes: Axes, ends: dict[str, float]) -> None:
    """From the top down, as the lines end."""
    handles, labels = axes.get_legend_handles_labels()
    pairs = sorted(zip(handles, labels, strict=True), key=lambda pair: -ends[pair[1]])
    axes.legend(
        *zip(*pairs, strict=True),
        frameon=False,
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )


if __name__ == "__main__":
    pictures.command(lambda path: draw(read_result(path)), __doc__, dpi=120)
