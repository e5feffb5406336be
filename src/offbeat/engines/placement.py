"""Which stages of which replica live in which process."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """A grid of ranks, and which of them this process is.

    >>> Placement.in_one(stages=3).stages_of(0)
    [0, 1, 2]
    >>> one_each = Placement.one_each(stages=2, replicas=2, rank=3)
    >>> one_each.replicas_here, one_each.stages_of(1), one_each.listeners
    ([1], [1], [0, 1])
    """

    ranks: tuple[tuple[int, ...], ...]
    """Per replica and stage the process that holds it."""
    rank: int

    @classmethod
    def in_one(cls, stages: int, replicas: int = 1) -> "Placement":
        """All stages of all replicas in this process."""
        return cls(((0,) * stages,) * replicas, 0)

    @classmethod
    def one_each(cls, stages: int, replicas: int, rank: int) -> "Placement":
        """A process for every stage of every replica, replica after replica."""
        rows = (range(r * stages, (r + 1) * stages) for r in range(replicas))
        return cls(tuple(map(tuple, rows)), rank)

    @cached_property
    def stages(self) -> int:
        return len(self.ranks[0])

    @cached_property
    def replicas(self) -> int:
        return len(self.ranks)

    @cached_property
    def replicas_here(self) -> list[int]:
        return [replica for replica, row in enumerate(self.ranks) if self.rank in row]

    def stages_of(self, replica: int) -> list[int]:
        """The stages of a replica that live in this process."""
        return [stage for stage, rank in enumerate(self.ranks[replica]) if rank == self.rank]

    @cached_property
    def holds_first(self) -> bool:
        """Whether the first stage of some replica lives in this process."""
        return any(row[0] == self.rank for row in self.ranks)

    @cached_property
    def holds_last(self) -> bool:
        return any(row[-1] == self.rank for row in self.ranks)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all stages of the replicas of this process live in it."""
        return all(len(self.stages_of(replica)) == self.stages for replica in self.replicas_here)

    @cached_property
    def own_replica(self) -> int | None:
        """Whose part of a batch this process trains on; None where all replicas live in it."""
        here = self.replicas_here
        return here[0] if len(here) == 1 < self.replicas or not self.is_whole else None

    @cached_property
    def listeners(self) -> list[int]:
        """The stages that are told every loss: the last that each process of a replica holds."""
        row = self.ranks[self.replicas_here[0]]
        return sorted({rank: stage for stage, rank in enumerate(row)}.values())
