"""Draws the results: one panel per model, one bar per way to use two cores.

python -m benchmarks.two_cores.figure benchmarks/two_cores/results.jsonl
"""

from typing import Any

from benchmarks import pictures
from benchmarks.stored import read_result
from benchmarks.two_cores.summary import TITLES, balance, headline
from benchmarks.two_cores.variants import Family
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS: dict[Family, str] = {
    "asynchronous": "#0b6e99",
    "offbeat": "#8cc6dc",
    "data parallel": "#b8b2a7",
    "torch pipelining": "#e0a458",
}
WORDS: dict[Family, str] = {
    "asynchronous": "offbeat, asynchronous",
    "offbeat": "offbeat, synchronous",
    "data parallel": "whole model on both cores",
    "torch pipelining": "torch.distributed.pipelining, best number of micro-batches",
}


def draw(results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(max(10, 6 * len(results)), 5.4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (model, result) in zip(panels, results.items(), strict=True):
        draw_panel(axes, TITLES[model], result)
    marks = [Patch(color=colour, label=WORDS[family]) for family, colour in COLOURS.items()]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_panel(axes: Axes, title: str, result: dict[str, Any]) -> None:
    bars = headline(result)[::-1]  # matplotlib counts from the bottom
    ratios = [row.times_one_core for row in bars]
    spread = [
        [one.centre - one.low for one in ratios],
        [one.high - one.centre for one in ratios],
    ]
    axes.barh(
        [row.label for row in bars],
        [one.centre for one in ratios],
        xerr=spread,
        color=[COLOURS[row.family] for row in bars],
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
    )
    for place, row in enumerate(bars):
        ink = "white" if row.family == "asynchronous" else "black"
        axes.text(
            0.04, place, f"{row.times_one_core.centre:.2f}", va="center", fontsize=8, color=ink
        )
    limit = balance(result).centre
    axes.axvline(limit, color="#444444", linestyle=":", linewidth=1)
    axes.text(limit, len(bars) - 0.4, f"cut allows {limit:.2f} ", ha="right", fontsize=8)
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.set_xlim(0, 1.1 * max(limit, *(one.high for one in ratios)))
    axes.set_title(title, loc="left")
    axes.set_xlabel("times one core, mean and 95 % interval")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    pictures.command(lambda path: draw(read_result(path)), __doc__, dpi=130)
