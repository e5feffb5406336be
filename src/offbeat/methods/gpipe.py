"""GPipe: micro-batches all forward, then all backward, then one update."""

from dataclasses import dataclass, field

from offbeat.methods.base import MOST, Method, require_count
from offbeat.schedules.schedule import Schedule, Slot


@dataclass(frozen=True)
class GPipe(Method):
    """All forwards of a step, then all backwards, then a flush and one update.

    Update: ``W[n+1] = Opt(W[n], mean of the micro-batches' gradients at W[n])``.
    Lag: 0. Memory: one set of weights, ``micro_batches`` graphs.
    Reference: Huang et al., "GPipe", 2019 (arXiv 1811.06965).

    >>> print(GPipe(micro_batches=2).schedule(2).table(1).grid())
    tick       0  1  2  3  4  5
    stage 0   F0 F1  .  . B0 B1
    stage 1    . F0 F1 B0 B1  .
    """

    name = "gpipe"
    title = "GPipe"
    lag_formula = "0"
    copies = "1"
    waits_for = "the flush of every step"
    reference = "Huang et al. 2019, arXiv 1811.06965"

    micro_batches: int = field(default=4, metadata={"help": "micro-batches per update."})

    def __post_init__(self) -> None:
        require_count("micro_batches", self.micro_batches, MOST)

    def schedule(self, stages: int) -> Schedule:
        chunks = range(self.micro_batches)
        cycle = (*(Slot("F", i) for i in chunks), *(Slot("B", i) for i in chunks), Slot("U", 0))
        return Schedule((cycle,) * stages, self.micro_batches)
