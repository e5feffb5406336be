"""Slopes of the mean squared gradient against the steps, and its ratio to BP's, as tables.

PYTHONPATH=src python -m benchmarks.claims.summary benchmarks/claims/convergence.jsonl
"""

import argparse
import json
from math import exp, log, sqrt
from pathlib import Path
from statistics import linear_regression, mean, stdev

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""97.5 % quantiles of Student's distribution by the number of values."""

Runs = dict[str, dict[int, dict[int, float]]]
"""Mean squared gradient by method, steps and seed."""


def read(path: Path) -> Runs:
    """The runs of seeds that are complete."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    horizons = sorted({row["steps"] for row in rows})
    found = {(r["method"], r["steps"], r["seed"]): r["mean_squared_gradient"] for r in rows}
    seeds = [
        seed
        for seed in sorted({row["seed"] for row in rows})
        if all((method, steps, seed) in found for method in methods for steps in horizons)
    ]
    return {
        method: {steps: {s: found[method, steps, s] for s in seeds} for steps in horizons}
        for method in methods
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    return mean(values), STUDENT[len(values)] * stdev(values) / sqrt(len(values))


def slope(by_steps: dict[int, dict[int, float]], horizons: list[int]) -> tuple[float, float]:
    """Of log squared gradient against log steps, fitted seed by seed."""
    seeds = by_steps[horizons[0]]
    steps = [log(horizon) for horizon in horizons]
    return interval(
        [linear_regression(steps, [log(by_steps[h][s]) for h in horizons]).slope for s in seeds]
    )


def ratio(runs: Runs, method: str, steps: int) -> tuple[float, float, float]:
    """To BP with the same start and batches: geometric mean over seeds, and its 95 % interval."""
    own, reference = runs[method][steps], runs["BP"][steps]
    centre, half = interval([log(own[seed] / reference[seed]) for seed in own])
    return exp(centre), exp(centre - half), exp(centre + half)


def slope_of_excess(runs: Runs, method: str) -> float:
    """Of log (mean over seeds of what a method has more than BP) against log steps."""
    horizons = list(runs[method])
    more = [mean(runs[method][h].values()) - mean(runs["BP"][h].values()) for h in horizons]
    return linear_regression([log(h) for h in horizons], [log(value) for value in more]).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("results", type=Path)
    runs = read(parser.parse_args().results)
    horizons = list(runs["BP"])
    columns = " | ".join(map(str, horizons))
    print(f"{len(runs['BP'][horizons[0]])} seeds\n")
    print(f"| method | {columns} | slope, all | slope, last three |")
    print("|---" * (len(horizons) + 3) + "|")
    for method, by_steps in runs.items():
        cells = ["{:.4f} ± {:.4f}".format(*interval(list(by_steps[h].values()))) for h in horizons]
        fits = ["{:.2f} ± {:.2f}".format(*slope(by_steps, h)) for h in (horizons, horizons[-3:])]
        print(f"| {method} | {' | '.join(cells + fits)} |")
    print(f"\n| ratio to BP | {columns} |")
    print("|---" * (len(horizons) + 1) + "|")
    for method in runs:
        if method != "BP":
            cells = ["{:.2f} ({:.2f} to {:.2f})".format(*ratio(runs, method, h)) for h in horizons]
            print(f"| {method} | {' | '.join(cells)} |")
    print()
    for method in ("DSP-SGD", "DSP-Momentum", "ADL M=4"):
        print(f"{method}: slope of the excess over BP {slope_of_excess(runs, method):.2f}")


if __name__ == "__main__":
    main()
