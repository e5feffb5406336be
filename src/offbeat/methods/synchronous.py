"""Plain back-propagation."""

from dataclasses import dataclass

from offbeat.methods.base import Method
from offbeat.schedules.schedule import Schedule, stagger


@dataclass(frozen=True)
class Synchronous(Method):
    """Plain back-propagation: the bits of an ordinary PyTorch loop.

    Update: ``W[n+1] = Opt(W[n], g(W[n]))``, one stage after the other.
    Lag: 0. Memory: one set of weights, one graph.

    >>> print(Synchronous().schedule(2).table(2).grid())
    tick       0  1  2  3  4  5  6  7
    stage 0   F0  .  . B0 F1  .  . B1
    stage 1    . F0 B0  .  . F1 B1  .
    """

    name = "synchronous"
    title = "Synchronous"
    lag_formula = "0"
    copies = "1"
    waits_for = "everything"
    reference = "back-propagation (BP)"

    def schedule(self, stages: int) -> Schedule:
        return Schedule(stagger((0,) * stages))
