"""Draws the mean squared gradient against the steps, and its ratio to BP's.

PYTHONPATH=src python -m benchmarks.claims.figure benchmarks/claims/convergence.jsonl
"""

from statistics import fmean

from benchmarks import pictures
from benchmarks.claims.summary import Runs, over_bp, read, slope
from benchmarks.intervals import mean
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette; two of a family share a hue.
STYLES: dict[str, tuple[str, str]] = {
    "BP": ("#000000", "o"),
    "DSP-SGD": ("#56B4E9", "P"),
    "DSP-Momentum": ("#0072B2", "X"),
    "ADL M=4": ("#D55E00", "D"),
    "DaSGD": ("#E69F00", "s"),
    "DaSGD progress=1": ("#CC79A7", "^"),
}


def draw(runs: Runs) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_gradients(left, runs)
    _draw_ratios(right, runs)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(list(runs["BP"]), [str(steps) for steps in runs["BP"]])
        axes.minorticks_off()
        axes.set_xlabel("steps T of the run, learning rate c / sqrt(T)")
        axes.grid(alpha=0.3)
    return figure


def _draw_gradients(axes: Axes, runs: Runs) -> None:
    for method, by_steps in runs.items():
        colour, marker = STYLES[method]
        points = [mean(list(seeds.values())) for seeds in by_steps.values()]
        fitted = slope(by_steps, list(by_steps)).centre
        axes.errorbar(
            list(by_steps),
            [point.centre for point in points],
            yerr=[point.high - point.centre for point in points],
            color=colour,
            marker=marker,
            markersize=5,
            capsize=3,
            linewidth=1.5,
            label=f"{method}: slope {fitted:.2f}",
        )
    horizons = list(runs["BP"])
    lowest = 0.5 * min(fmean(runs[m][horizons[0]].values()) for m in runs)
    guide = [lowest * (steps / horizons[0]) ** -0.5 for steps in horizons]
    axes.plot(horizons, guide, "--", color="#777777", label="the theorems' slope: -0.50")
    axes.set_yscale("log")
    axes.set_ylabel("mean over the run of the squared gradient of f")
    axes.set_title("Digits, 4 stages or 4 replicas; bars: 95 % over seeds")
    axes.legend(frameon=False)


def _draw_ratios(axes: Axes, runs: Runs) -> None:
    for method, by_steps in runs.items():
        if method == "BP":
            continue
        colour, marker = STYLES[method]
        points = [over_bp(runs, method, steps) for steps in by_steps]
        axes.errorbar(
            list(by_steps),
            [point.centre for point in points],
            yerr=[
                [point.centre - point.low for point in points],
                [point.high - point.centre for point in points],
            ],
            color=colour,
            marker=marker,
            markersize=5,
            capsize=3,
            linewidth=1.5,
            label=method,
        )
    axes.axhline(1.0, color="#777777", linestyle="--")
    axes.set_ylabel("ratio to BP, same start and batches")
    axes.set_title("What staleness adds, beside BP")
    axes.legend(frameon=False)


if __name__ == "__main__":
    pictures.command(lambda path: draw(read(path)), __doc__, dpi=120)
