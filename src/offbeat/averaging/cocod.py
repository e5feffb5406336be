"""CoCoD-SGD: a whole round late, and nothing of it lost."""

from dataclasses import dataclass

from offbeat.averaging.base import Periodic, Plan


@dataclass(frozen=True)
class CoCoD(Periodic):
    """Computation and communication decoupled: ``x_i <- z + (x_i - x_i,sent)`` a round late.

    The average z of one round's start is merged at its end, with the whole round's own progress on
    top: ``DaSGD(every, delay=every, keep=0, progress=1)``. Reference: Shen et al., "Faster
    Distributed Deep Net Training: Computation and Communication Decoupled SGD", IJCAI 2019 (arXiv
    1906.12043).
    """

    name = "cocod"
    title = "CoCoD-SGD"
    reference = "Shen et al. 2019, arXiv 1906.12043"

    def plan(self) -> Plan:
        return Plan(every=self.every, delay=self.every, keep=0.0, progress=1.0)
