"""Draws the increase of a step's time against the slow-down, one line per method.

python -m benchmarks.stragglers.figure benchmarks/stragglers/results.jsonl
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.stored import read_result
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


def draw(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    axes = figure.add_subplot()
    rows = result["summary"]
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        colour, marker = STYLES[name]
        means = [row["increase_percent"] for row in mine]
        spread = [
            [mean - row["lowest_percent"] for mean, row in zip(means, mine, strict=True)],
            [row["highest_percent"] - mean for mean, row in zip(means, mine, strict=True)],
        ]
        axes.errorbar(
            [100 * row["slowdown"] for row in mine],
            means,
            yerr=spread,
            color=colour,
            marker=marker,
            markersize=5,
            capsize=3,
            linewidth=1.5,
            label=name,
        )
    slowdowns = sorted({row["slowdown"] for row in rows})
    ends = [0.0, slowdowns[-1]]
    floors = [100 * result["setting"]["probability"] * by for by in ends]
    axes.plot([100 * by for by in ends], floors, "--", color="#777777", label="floor: a third")
    axes.set_xlabel("slow-down of a slowed stage, %")
    axes.set_ylabel("increase of the mean time per step, %")
    axes.set_xticks([0, *(100 * by for by in slowdowns)])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda n: -_last(labels[n], rows, floors[-1]))
    axes.legend([handles[n] for n in order], [labels[n] for n in order], frameon=False)
    compute = "sleeping" if result["setting"]["work"]["compute"] == "sleep" else "computing"
    axes.set_title(f"Every (stage, step) slowed with probability 1/3; 4 {compute} processes")
    return figure


def _last(name: str, rows: list[dict[str, Any]], floor: float) -> float:
    """Where a line ends: the legend lists them from the top down."""
    ends = {row["method"]: float(row["increase_percent"]) for row in rows}
    return ends.get(name, floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="by default beside the results")
    arguments = parser.parse_args()
    out = arguments.out or arguments.results.with_suffix(".png")
    draw(read_result(arguments.results)).savefig(out, dpi=120)
    print(out)


if __name__ == "__main__":
    main()
