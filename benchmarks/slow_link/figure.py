"""Draws the time per step against the rate of the links, one line per contestant.

python benchmarks/slow_link/figure.py benchmarks/slow_link/results.jsonl
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import pictures
from benchmarks.slow_link.summary import ALONE, LINK, Point, points
from benchmarks.stored import read_result

# Okabe and Ito's palette; the three DaSGDs are one hue, darker with more delay.
STYLES: dict[str, tuple[str, str]] = {
    "DDP": ("#000000", "o"),
    "DDP 1 MB buckets": ("#777777", "s"),
    "AllReduce": ("#E69F00", "^"),
    "LocalSGD": ("#009E73", "D"),
    "DaSGD delay 1": ("#9ECAE8", "P"),
    "DaSGD delay 2": ("#4292C6", "P"),
    "DaSGD delay 4": ("#084594", "P"),
}
TITLES = {
    "real": "real work on the core that sends",
    "sleep": "sleeping work, core free to send",
}
TICKS = (1, 1.25, 1.5, 2, 3, 4, 6, 8)


def draw(results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6.2 * len(results), 5.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for axes, (compute, result) in zip(panels, results.items(), strict=True):
        draw_panel(axes, result)
        rounds = result["setting"]["rounds"]
        axes.set_title(f"{TITLES[compute]}; {rounds} rounds", loc="left", fontsize=11)
    # The panels share their axis: ticks for the highest of them.
    top = panels[0].get_ylim()[1]
    ticks = [tick for tick in TICKS if tick < top]
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("time per step, times a replica alone\n(mean, lowest and highest round)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def draw_panel(axes: Axes, result: dict[str, Any]) -> None:
    found = points(result)
    rates = result["setting"]["rates"]
    for name, (colour, marker) in STYLES.items():
        mine = sorted((p for p in found if p.name == name), key=lambda p: p.mbit)
        axes.errorbar(
            [p.mbit for p in mine],
            [p.over.centre for p in mine],
            yerr=[
                [max(0.0, p.over.centre - min(p.ratios)) for p in mine],
                [max(0.0, max(p.ratios) - p.over.centre) for p in mine],
            ],
            color=colour,
            marker=marker,
            markersize=5,
            capsize=2,
            linewidth=1.5,
            label=name,
        )
        if mine[0].average_steps is not None:
            axes.plot(*formula(mine), "--", color=colour, linewidth=1, alpha=0.9)
    axes.plot([], [], "--", color="#777777", linewidth=1, label="formula")
    axes.axhline(1, color="#CC79A7", linewidth=1.2, label=ALONE, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(rates, [_tick(found, mbit) for mbit in rates], fontsize=9)
    axes.set_xlabel("rate of each link, Mbit/s; below: a bare all-reduce, in steps")
    pictures.plain(axes)


def formula(mine: list[Point]) -> tuple[np.ndarray, np.ndarray]:
    """The formula between the rates too: an average's time is a line over the inverse rate."""
    mbit = np.geomspace(mine[0].mbit, mine[-1].mbit, 200)
    taken = np.interp(
        1 / mbit,
        [1 / p.mbit for p in reversed(mine)],
        [p.average_steps or 0.0 for p in reversed(mine)],
    )
    every, delay = mine[0].every, mine[0].delay
    return mbit, (every + np.maximum(0.0, taken - delay)) / every


def _tick(found: list[Point], mbit: float) -> str:
    (steps,) = (p.over.centre for p in found if (p.name, p.mbit) == (LINK, mbit))
    return f"{mbit:g}\n({steps:.1f})"


if __name__ == "__main__":
    pictures.command(lambda path: draw(read_result(path)), __doc__, dpi=120)
