"""Draws the speeds of one GPU, and real training in seconds against accuracy.

python -m benchmarks.one_gpu.figure benchmarks/one_gpu/results.jsonl --out speeds.png
python -m benchmarks.one_gpu.figure benchmarks/one_gpu/training.jsonl --training --out training.png
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.one_gpu.summary import complete, read
from benchmarks.pictures import INK
from benchmarks.stored import Row, read_rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: ours in blue and green, the others in greys and orange.
COLOURS = {
    "eager": "#cccccc",
    "graph": "#999999",
    "compiled, reduce-overhead": "#F0E442",
    "compiled, graph": "#E69F00",
}
OURS, OURS_COMPILED = "#56B4E9", "#0072B2"
LINES = ("#444444", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00")


def draw_speeds(found: dict[str, dict[str, Row]]) -> Figure:
    heights = [0.5 + 0.2 * len(rows) for rows in found.values()]
    figure = Figure(figsize=(8.5, 0.4 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (workload, rows) in zip(panels[:, 0], found.items(), strict=True):
        _draw_workload(axes, workload, {n: row for n, row in rows.items() if complete(row)})
    panels[-1, 0].set_xlabel("times as fast as the network as one CUDA graph", color=INK)
    return figure


def _draw_workload(axes: Axes, workload: str, rows: dict[str, Row]) -> None:
    base = rows["graph"]["ms"]
    for line, (name, row) in enumerate(rows.items()):
        ours = OURS_COMPILED if "compiled" in name else OURS
        speed = base / row["ms"]
        axes.barh(-line, speed, color=COLOURS.get(name, ours), height=0.75)
        axes.text(speed, -line, f" {speed:.2f}", va="center", fontsize=7, color=INK)
    axes.set_yticks([-line for line in range(len(rows))], list(rows), fontsize=7)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_title(workload, fontsize=9, loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def draw_training(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["run"] for row in rows))
    for name, colour in zip(names, LINES, strict=False):
        runs = [row["epochs"] for row in rows if row["run"] == name]
        for number, epochs in enumerate(runs):
            ends = [epoch[-1] for epoch in runs]
            seconds = fmean(end["seconds"] for end in ends)
            accuracy = 100 * fmean(end["accuracy"] for end in ends)
            axes.plot(
                [epoch["seconds"] for epoch in epochs],
                [100 * epoch["accuracy"] for epoch in epochs],
                color=colour,
                marker=".",
                linewidth=1.2,
                label=f"{name}: {accuracy:.1f} % in {seconds:.1f} s" if number == 0 else None,
            )
    axes.set_xlabel("seconds of training", color=INK)
    axes.set_ylabel("test accuracy, %", color=INK)
    axes.set_title(
        f"{rows[0]['network']}, CIFAR-10, one {rows[0]['device']}", color=INK, loc="left"
    )
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of one GPU.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--training", action="store_true", help="results of train.py")
    parser.add_argument("--out", type=Path, default=Path("speeds.png"))
    arguments = parser.parse_args()
    if arguments.training:
        figure = draw_training(read_rows(arguments.results))
    else:
        figure = draw_speeds(read(arguments.results))
    figure.savefig(arguments.out, dpi=150)


if __name__ == "__main__":
    main()
