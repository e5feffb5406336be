"""Means and ratios with their 95 % intervals, by Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import fmean, stdev, variance

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of 1, 2, ... degrees of freedom: 95 % lie within so many standard errors."""
NORMAL = 1.959964


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


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return student(len(values) - 1) * stdev(values) / sqrt(len(values))


def student(freedom: int) -> float:
    """Student's t; beyond the table by its series, which has three digits right from there on.

    >>> round(student(20), 3), round(student(60), 3)
    (2.086, 2.0)
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
