"""Slopes of the mean squared gradient against the steps, and its ratio to BP's; memory.

PYTHONPATH=src python -m benchmarks.claims.summary benchmarks/claims/convergence.jsonl
"""

import argparse
from collections.abc import Iterator
from math import log
from pathlib import Path
from statistics import fmean, linear_regression

from benchmarks.intervals import Interval, mean, ratio
from benchmarks.pages import slug
from benchmarks.stored import read_result, read_rows

FOLDER = Path(__file__).parent
EXCESS = ("DSP-SGD", "DSP-Momentum", "ADL M=4")
"""Methods that stay above BP."""

Runs = dict[str, dict[int, dict[int, float]]]
"""Mean squared gradient by method, steps and seed."""


def read(path: Path) -> Runs:
    """The runs of seeds that are complete."""
    rows = read_rows(path)
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


def slope(by_steps: dict[int, dict[int, float]], horizons: list[int]) -> Interval:
    """Of log squared gradient against log steps, fitted seed by seed."""
    seeds = by_steps[horizons[0]]
    steps = [log(horizon) for horizon in horizons]
    return mean(
        [linear_regression(steps, [log(by_steps[h][s]) for h in horizons]).slope for s in seeds]
    )


def over_bp(runs: Runs, method: str, steps: int) -> Interval:
    """The ratio to BP with the same start and batches."""
    own, reference = runs[method][steps], runs["BP"][steps]
    return ratio([own[seed] for seed in own], [reference[seed] for seed in own])


def slope_of_excess(runs: Runs, method: str) -> float:
    """Of log (mean over seeds of what a method has more than BP) against log steps."""
    horizons = list(runs[method])
    more = [fmean(runs[method][h].values()) - fmean(runs["BP"][h].values()) for h in horizons]
    return linear_regression([log(h) for h in horizons], [log(value) for value in more]).slope


def facts() -> Iterator[tuple[str, float | Interval]]:
    runs = read(FOLDER / "convergence.jsonl")
    for method, by_steps in runs.items():
        name, horizons = slug(method), list(by_steps)
        yield f"{name}.slope", slope(by_steps, horizons)
        if method in EXCESS:
            yield f"{name}.slope-of-excess", slope_of_excess(runs, method)
        for steps in horizons if method != "BP" else ():
            yield f"{name}.{steps}", over_bp(runs, method, steps)
    for network, found in read_result(FOLDER / "memory.json")["networks"].items():
        for method in ("PipeDream", "StaleWeights", "StaleWeights, stashed"):
            yield f"memory.{slug(network)}.{slug(method)}", found["measured"][method]["percent"]


def tables() -> dict[str, str]:
    runs = read(FOLDER / "convergence.jsonl")
    return {"gradients": gradients(runs), "ratios": ratios(runs)}


def gradients(runs: Runs) -> str:
    horizons = list(runs["BP"])
    heads = " | ".join([f"T = {horizons[0]}", *map(str, horizons[1:])])
    lines = [
        f"| method | {heads} | slope | slope from {horizons[-3]} on |",
        "|---" * (len(horizons) + 3) + "|",
    ]
    for method, by_steps in runs.items():
        cells = [_spread(mean(list(by_steps[h].values())), 3) for h in horizons]
        cells += [_spread(slope(by_steps, some), 2) for some in (horizons, horizons[-3:])]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(runs: Runs) -> str:
    horizons = list(runs["BP"])
    heads = " | ".join([f"T = {horizons[0]}", *map(str, horizons[1:])])
    lines = [f"| method | {heads} |", "|---" * (len(horizons) + 1) + "|"]
    for method in runs:
        if method != "BP":
            cells = [f"{over_bp(runs, method, h):.2f}" for h in horizons]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(of: Interval, digits: int) -> str:
    return f"{of.centre:.{digits}f} ± {of.high - of.centre:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("results", type=Path)
    runs = read(parser.parse_args().results)
    print(f"{gradients(runs)}\n\n{ratios(runs)}\n")
    for method in EXCESS:
        print(f"{method}: slope of the excess over BP {slope_of_excess(runs, method):.2f}")


if __name__ == "__main__":
    main()
