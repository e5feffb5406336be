"""Draws, per set, the points that each way stays below BP; or those against the stale share.

python -m benchmarks.accuracy.figure benchmarks/accuracy/*.jsonl --only eight four twenty
python -m benchmarks.accuracy.figure benchmarks/accuracy/*.jsonl --shares --out registers.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.configurations import BASELINE, SETS
from benchmarks.accuracy.summary import Found, of_set, rows_in
from benchmarks.pictures import INK
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

# Okabe and Ito's palette, by what a way does about its staleness.
LOOKS = {
    "nothing": "#D55E00",
    "accumulates": "#0072B2",
    "corrects": "#009E73",
    "both": "#CC79A7",
    "ends synchronously": "#E69F00",
    "micro-batches without staleness": "#999999",
}
LINEAR = 0.5
"""Points around zero that are drawn in proportion where larger gaps are drawn as logarithms."""
TICKS = (-5, -2, -1, -0.5, -0.2, 0, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
PER_LINE = 0.24
BY_SHARE = "registers"


def kind_of(way: str) -> str:
    if way.startswith("BP"):
        return "micro-batches without staleness"
    if way.endswith(("tail", "half")):
        return "ends synchronously"
    accumulates, corrects = "M=" in way, "+" in way or way == "PipeMare"
    if accumulates:
        return "both" if corrects else "accumulates"
    return "corrects" if corrects else "nothing"


def draw(found: dict[str, list[Found]]) -> Figure:
    shown = {
        name: [summary for summary in of if summary.way != BASELINE and summary.gaps]
        for name, of in found.items()
    }
    heights = [0.7 + PER_LINE * len(of) for of in shown.values()]
    figure = Figure(figsize=(8.5, 0.6 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for axes, (name, of) in zip(panels, shown.items(), strict=True):
        draw_set(axes, of, SETS[name].question)
    panels[-1].set_xlabel("points of test accuracy below BP (bars: 95 % intervals)", color=INK)
    used = {kind_of(summary.way) for of in shown.values() for summary in of}
    handles = [
        panels[0].plot([], [], "o", color=colour, label=kind)[0]
        for kind, colour in LOOKS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_set(axes: Axes, found: Sequence[Found], title: str) -> None:
    several = len({summary.cut for summary in found}) > 1
    for line, summary in enumerate(found):
        axes.errorbar(
            summary.gap,
            -line,
            xerr=summary.half,
            fmt="o",
            color=LOOKS[kind_of(summary.way)],
            markersize=4,
            elinewidth=1.2,
        )
    names = [f"{s.way}, {s.cut}" if several else s.way for s in found]
    names = [
        name if len(s.accuracies) == s.seeds else f"{name} ({s.counted} seeds, else guesses)"
        for name, s in zip(names, found, strict=True)
    ]
    axes.set_yticks([-line for line in range(len(found))], names, fontsize=8)
    axes.set_xscale("symlog", linthresh=LINEAR)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda points, _: f"{points:g}"))
    axes.set_ylim(-len(found) + 0.3, 0.7)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def draw_shares(found: Sequence[Found]) -> Figure:
    """Against the share of all weights that lie before the register."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for way in dict.fromkeys(summary.way for summary in found if summary.way != BASELINE):
        mine = [summary for summary in found if summary.way == way and summary.gaps]
        axes.errorbar(
            [100 * summary.stale_share for summary in mine],
            [summary.gap for summary in mine],
            [summary.half or 0.0 for summary in mine],
            color=LOOKS[kind_of(way)],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=way,
        )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("stale weights, % of all", color=INK)
    axes.set_ylabel("points below BP (bars: 95 %)", color=INK)
    title = f"{SETS[BY_SHARE].network}, one register, {found[0].epochs} epochs"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="The accuracies as a picture.")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--shares", action="store_true", help=f"of {BY_SHARE}, against the share")
    parser.add_argument("--out", type=Path, default=Path("results.png"))
    arguments = parser.parse_args()
    rows = rows_in(arguments.results)
    names = [BY_SHARE] if arguments.shares else arguments.only
    found = {name: of_set(rows, name) for name in names}
    drawn = {name: of[0] for name, of in found.items() if of}
    if not drawn:
        raise SystemExit("None of these sets has results yet.")
    figure = draw_shares(drawn[BY_SHARE]) if arguments.shares else draw(drawn)
    figure.savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    main()
