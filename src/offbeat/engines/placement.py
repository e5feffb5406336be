"""Which stages of which replica live in which process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from offbeat.cutting.balance import cut_by_costs


@dataclass(frozen=True)
class Placement:
    """Rows of processes, and which of them this process is.

    A *row* is the processes that hold a replica; each has stages of it that follow each other. Or
    it is one process, which then may hold several replicas. All rows are as long, and alike.

    >>> Placement.across(stages=3, replicas=1, processes=1, rank=0).stages_here
    [0, 1, 2]
    >>> split = Placement.across(stages=3, replicas=2, processes=4, rank=3)
    >>> split.row, split.replicas_here, split.stages_here, split.firsts, split.listeners
    ([2, 3], [1], [1, 2], [0, 1], [0, 2])
    >>> whole = Placement.across(stages=3, replicas=4, processes=2, rank=1)
    >>> whole.row, whole.replicas_here, whole.stages_here, whole.share
    ([1], [2, 3], [0, 1, 2], 1)
    """

    ranks: tuple[tuple[int, ...], ...]
    """Per replica and stage the process that holds it."""
    rank: int

    @classmethod
    def across(
        cls,
        stages: int,
        replicas: int,
        processes: int,
        rank: int,
        counts: Sequence[int] | None = None,
    ) -> "Placement":
        """Replica after replica over all processes, which must be as many as fit.

        ``counts``: how many stages each process of a row holds; about equally many by default.
        """
        together, places = max(1, replicas // processes), max(1, processes // replicas)
        counts = counts or counts_by([1.0] * stages, places)
        row = [place for place, count in enumerate(counts) for _ in range(count)]
        rows = [[places * (r // together) + place for place in row] for r in range(replicas)]
        return cls(tuple(map(tuple, rows)), rank)

    @cached_property
    def stages(self) -> int:
        return len(self.ranks[0])

    @cached_property
    def replicas(self) -> int:
        return len(self.ranks)

    def row_of(self, replica: int) -> list[int]:
        """The processes that hold a replica, in the order of its stages."""
        return sorted(set(self.ranks[replica]))

    @cached_property
    def row(self) -> list[int]:
        """The processes of this one's row."""
        return self.row_of(self.replicas_here[0])

    @cached_property
    def place(self) -> int:
        """Which process of its row this is."""
        return self.row.index(self.rank)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many stages each process of a row holds."""
        return tuple(map(self.ranks[0].count, self.row_of(0)))

    @cached_property
    def column(self) -> list[int]:
        """The processes at this one's place in every row."""
        return sorted({self.row_of(replica)[self.place] for replica in range(self.replicas)})

    @cached_property
    def rows(self) -> int:
        return len(set(self.ranks))

    @cached_property
    def replicas_of_rows(self) -> list[list[int]]:
        """Row by row, the replicas that it holds."""
        rows = dict.fromkeys(self.ranks)
        return [[r for r, ranks in enumerate(self.ranks) if ranks == row] for row in rows]

    @cached_property
    def share(self) -> int:
        """Which row this is, and which part of a batch it trains on."""
        return self.rank // len(self.row)

    @cached_property
    def replicas_here(self) -> list[int]:
        return [replica for replica, row in enumerate(self.ranks) if self.rank in row]

    def stages_of(self, replica: int) -> list[int]:
        """The stages of a replica that live in this process."""
        return [stage for stage, rank in enumerate(self.ranks[replica]) if rank == self.rank]

    @cached_property
    def stages_here(self) -> list[int]:
        """The stages that this process holds, of every replica that it holds."""
        return self.stages_of(self.replicas_here[0])

    @cached_property
    def holds_first(self) -> bool:
        return self.stages_here[0] == 0

    @cached_property
    def holds_last(self) -> bool:
        return self.stages_here[-1] == self.stages - 1

    @cached_property
    def is_whole(self) -> bool:
        """Whether all stages of the replicas of this process live in it."""
        return len(self.row) == 1

    @cached_property
    def firsts(self) -> list[int]:
        """The first stage that each process of a row holds."""
        own = self.ranks[self.replicas_here[0]]
        return [own.index(rank) for rank in self.row]

    @cached_property
    def listeners(self) -> list[int]:
        """The stages that are told every loss: the last that each process of a row holds."""
        return [first - 1 for first in self.firsts[1:]] + [self.stages - 1]


def counts_by(costs: Sequence[float], places: int) -> list[int]:
    """How many stages each of so many processes holds, where the stages cost so much.

    >>> counts_by([4, 1, 1, 1], 2)
    [1, 3]
    """
    cuts = [0, *cut_by_costs(costs, places), len(costs)]
    return [end - begin for begin, end in pairwise(cuts)]
