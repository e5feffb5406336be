"""How sure a mean of a few values is: its 95 % interval, by Student's t."""

from collections.abc import Sequence
from math import sqrt
from statistics import stdev

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of 1, 2, ... degrees of freedom: 95 % lie within so many standard errors."""
NORMAL = 1.959964


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
