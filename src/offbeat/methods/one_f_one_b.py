"""1F1B with a flush (PipeDream-Flush): GPipe's weights with fewer graphs alive."""

from dataclasses import dataclass

from offbeat.methods.base import MOST, Method, require_count
from offbeat.schedules.schedule import Schedule, Slot


@dataclass(frozen=True)
class OneFOneB(Method):
    """One forward, one backward in turn after a short warm-up; flush and update per step.

    Update: GPipe's. Lag: 0. Memory: one set of weights, at most ``K - k`` graphs at stage k.
    Reference: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training".

    >>> print(OneFOneB(micro_batches=3).schedule(2).table(1).grid())
    tick       0  1  2  3  4  5  6  7
    stage 0   F0 F1  . B0 F2 B1  . B2
    stage 1    . F0 B0 F1 B1 F2 B2  .
    """

    name = "1f1b"
    title = "1F1B"
    lag_formula = "0"
    copies = "1"
    waits_for = "the flush of every step"
    reference = "Narayanan et al. 2021, arXiv 2006.09503"

    micro_batches: int = 4

    def __post_init__(self) -> None:
        require_count("micro_batches", self.micro_batches, MOST)

    def schedule(self, stages: int) -> Schedule:
        cycles = []
        for stage in range(stages):
            ahead = min(stages - 1 - stage, self.micro_batches - 1)
            cycle = [Slot("F", i) for i in range(ahead)]
            for i in range(self.micro_batches):
                cycle += [Slot("F", i + ahead)] if i + ahead < self.micro_batches else []
                cycle.append(Slot("B", i))
            cycles.append((*cycle, Slot("U", 0)))
        return Schedule(tuple(cycles), self.micro_batches)
