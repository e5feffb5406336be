"""Hierarchical local SGD: often among few that are near, seldom among all."""

from dataclasses import dataclass
from functools import partial

from offbeat.averaging.base import Periodic, Plan
from offbeat.methods.base import require_count


@dataclass(frozen=True, kw_only=True)
class HierarchicalSGD(Periodic):
    """``every`` local updates, then the average of a block of ``size`` replicas; of all each
    ``rounds``-th time.

    Blocks are replicas 0 to ``size - 1``, the next so many, and so on; the last may be smaller. For
    replicas that are near each other in blocks, with slow links between these. Reference: Lin,
    Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv
    1808.07217), hierarchical local SGD.
    """

    name = "hierarchical-sgd"
    title = "Hierarchical local SGD"
    reference = "Lin et al. 2020, arXiv 1808.07217"

    size: int
    rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("size", self.size)
        require_count("rounds", self.rounds)

    def plan(self) -> Plan:
        return Plan(every=self.every, partners=partial(block_of, settings=self))


def block_of(round: int, replica: int, replicas: int, *, settings: HierarchicalSGD) -> set[int]:
    if (round + 1) % settings.rounds == 0:
        return set(range(replicas))
    first = replica - replica % settings.size
    return set(range(first, min(first + settings.size, replicas)))
