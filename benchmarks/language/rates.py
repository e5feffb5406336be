"""Losses by seed, and the learning rate with which BP of an optimizer ends lowest."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from benchmarks.language.configurations import BASELINE, OPTIMIZERS
from benchmarks.language.data import VOCABULARY
from benchmarks.stored import Row

GUESSING = math.log(VOCABULARY)


def losses_of(rows: Iterable[Row]) -> dict[int, float]:
    """By seed; infinite where a run ended worse than guessing."""
    return {
        seed: math.inf if loss is None or loss > GUESSING else float(loss)
        for row in rows
        for seed, loss in zip(row["seeds"], row["losses"], strict=True)
    }


def tuned(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """BP's mean loss by optimizer and learning rate, over the seeds that all its rates have."""
    made = {}
    for optimizer in OPTIMIZERS:
        mine = [row for row in rows if (row["way"], row["optimizer"]) == (BASELINE, optimizer)]
        by_rate = {row["lr"]: losses_of(r for r in mine if r["lr"] == row["lr"]) for row in mine}
        shared = set.intersection(*map(set, by_rate.values())) if by_rate else set()
        if shared:
            made[optimizer] = {lr: fmean(of[s] for s in shared) for lr, of in by_rate.items()}
    return made


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """By optimizer; those that diverge at all their rates have none."""
    return {
        optimizer: min(losses, key=losses.__getitem__)
        for optimizer, losses in tuned(rows).items()
        if math.isfinite(min(losses.values()))
    }
