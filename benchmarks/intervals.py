"""Means and ratios with their 95 % intervals, by Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import fmean, variance

from offbeat.app.intervals import NORMAL, STUDENT, half_width, student

__all__ = [
    "NORMAL", "STUDENT", "Interval", "half_width", "mean", "ratio", "student", "unpaired_ratio",
    "verdict",
]  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean, and between what 95 % puts it; of a single value everything is possible.

    >>> f"{Interval(1.04, 0.98, 1.1):.2f}"
    '1.04 (0.98 to 1.10)'
    """

    centre: float
    low: float
    high: float

    def __format__(self, digits: str) -> str:
        return f"{self.centre:{digits}} ({self.low:{digits}} to {self.high:{digits}})"

    @property
    def values(self) -> list[float]:
        return [self.centre, self.low, self.high]


def verdict(values: Sequence[float]) -> str:
    """What a ratio of speeds with its interval says.

    >>> verdict([1.04, 0.98, 1.10]), verdict([1.2, 1.1, 1.3]), verdict([0.9, 0.8, 0.99])
    ('level', 'ahead', 'behind')
    """
    _, low, high = values
    return "ahead" if low > 1 else "behind" if high < 1 else "level"


def mean(values: Sequence[float]) -> Interval:
    half = half_width(values)
    half = inf if half is None else half
    return Interval(fmean(values), fmean(values) - half, fmean(values) + half)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of pairs, each measured in one round: the geometric mean.

    >>> f"{ratio([2, 2, 2], [1, 1, 1]):.1f}"
    '2.0 (2.0 to 2.0)'
    """
    return _exponential(mean([log(a / b) for a, b in zip(ours, theirs, strict=True)]))


def unpaired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of values measured in different rounds, by Welch: the ratio of geometric means."""
    logs = [log(a) for a in ours], [log(b) for b in theirs]
    errors = [variance(values) / len(values) for values in logs]
    centre, error = fmean(logs[0]) - fmean(logs[1]), sum(errors)
    shares = [e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True)]
    half = student(int(error**2 / sum(shares))) * sqrt(error) if error else 0.0
    return _exponential(Interval(centre, centre - half, centre + half))


def _exponential(of: Interval) -> Interval:
    return Interval(*(exp(value) if value < inf else inf for value in of.values))
