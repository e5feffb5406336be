"""What an engine is: where stages run, and how this process meets those that run elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from offbeat.cutting.cut import Cut
from offbeat.elastic.membership import Membership
from offbeat.elastic.survivors import Admission
from offbeat.engines.board import SharedNotes
from offbeat.engines.feed import pairs_of
from offbeat.engines.placement import Placement
from offbeat.engines.setup import Setup
from offbeat.engines.worker import Worker
from offbeat.errors import Deadlock
from offbeat.guards import Updates
from offbeat.nest import Nest
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings
from offbeat.stages.lanes import Lanes
from offbeat.stages.memory import StageMemory
from offbeat.transport.base import Transport


class OwnNotes:
    """The notes of a process that is alone."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    def tell(self, name: str, value: Any) -> None:
        self._told = {name: value}

    def hear(self, name: str, _ranks: Sequence[int] | None, _given_up: Any) -> list[Any]:
        return [self._told[name]]


Notes = OwnNotes | SharedNotes
"""How threads of several processes agree on facts."""


class Engine(ABC):
    """The workers of this process, a way to run them, and what it shares with other processes.

    What an engine does beside :meth:`run` is said here for one process, which is alone;
    :class:`offbeat.engines.processes.Processes` says the same for many. Whoever holds an engine
    never asks which one it is.
    """

    lanes: Sequence[Lanes] | None = None
    """Where each stage queues its work, if stages are recorded."""
    clock: Callable[[], Any] = staticmethod(perf_counter)
    """What the times of the ledger are read from."""
    runs_in_turn = False
    """Whether stages run one at a time, so that without lag all can write one memory."""
    membership: Membership | None = None
    """How this process and those of other replicas go on without one that dies, if they do."""
    returning = False
    """Whether this process's replica has come back and has not joined the others yet."""
    joined_at = 0
    """The last step at which a replica came back."""
    way_on = "Go on from a state with load_state_dict(), or build a new Trainer."
    """What a user can do after an error."""
    timeout_s = 0.0
    needs_costs = False
    """Whether stages are shared out among processes only once it is known what they cost."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.transports: dict[int, Transport] = {}
        """One for each replica of this process."""
        self.workers: list[Worker] = []
        self.ledger = Ledger()
        self.record: Callable[..., None] = self.ledger.record
        """Writes down what a worker did."""
        self.readings = Readings()
        self.updates = Updates()
        self.questions = 0
        """How often all processes have been asked for something together."""

    # ---------------------------------------------------------------- where it is

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def size(self) -> int:
        """How many processes train together."""
        return 1 + max(map(max, self.placement.ranks))

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a grid, "replica" times "stage"; None in one process."""
        return None

    @property
    def own_ledger(self) -> Ledger:
        """The entries of this process alone, without asking the others."""
        return self.ledger

    def shown_workers(self) -> list[Worker]:
        """Those of the first replica of this process, which speak for all where it is enough."""
        first = self.placement.replicas_here[0]
        return [worker for worker in self.workers if worker.stage.replica == first]

    # ---------------------------------------------------------------- running

    @abstractmethod
    def run(self) -> None:
        """Lets the workers do all that is pending."""

    def between_steps(self) -> AbstractContextManager[None]:
        """Where the caller reads or writes weights."""
        return nullcontext()

    # ---------------------------------------------------------------- beginning

    def place(self, counts: Sequence[int], *, agreed: bool = False) -> None:
        """Shares the stages out, so many to each process of a row; all processes must ask.

        ``agreed``: they know already that all mean the same.
        """

    def agree(self, setup: Setup, cut: Cut, seed: int | None) -> int:
        """Refuses processes that were set up differently; returns the seed to use."""
        return torch.initial_seed() if seed is None else seed

    def share_first(self, x: Nest) -> Nest:
        """The first batch, wherever stages are made from it."""
        return x

    def refuse_equal_shards(self, x: Nest, y: Nest) -> None:
        """Refuses replicas that are fed the same rows."""

    def batches(
        self, loader: Iterable[tuple[Nest, Nest]], *, all_need_targets: bool
    ) -> Iterator[tuple[Nest, Nest]]:
        """What this process needs of a loader's batches."""
        yield from pairs_of(loader, "batches")

    # ---------------------------------------------------------------- sharing

    def ask(self) -> int:
        """The number of the next question that all processes answer together."""
        self.questions += 1
        return self.questions

    def merge_ledger(self) -> Ledger:
        return self.own_ledger

    def merge_readings(self) -> Readings:
        return self.readings

    def merge_updates(self) -> Updates:
        return self.updates

    def gather_memory(self) -> list[StageMemory]:
        """What each stage of each replica holds now."""
        return [worker.memory() for worker in self.workers]

    def share_result(self, value: Callable[[], Any]) -> Any:
        """What the process with the last stage computes, wherever it is asked for."""
        return value()

    def share_tensors(self, tensors: Iterable[Tensor], stage: int) -> list[Tensor]:
        """One stage's tensors, wherever they are asked for; ``tensors`` says what to expect."""
        return list(tensors)

    def share_in_row(self, name: str, value: Any) -> list[Any]:
        """The value of every process of this replica."""
        return [value]

    def meet(self, name: str, value: Any = None) -> list[Any]:
        """Every process's value, by rank; nobody goes on before all are here."""
        return [value]

    def await_messages(self, step: int) -> None:
        """Returns when all that other stages have sent before this call has arrived."""

    def welcome(self, admission: Admission) -> None:
        """A replica has come back; all hear of it before the same step."""
        self.returning, self.joined_at = False, admission.step

    def first_replica(self) -> int:
        """The first replica that is there."""
        return 0

    def notes(self) -> Notes:
        """For a thread that has to agree with its like in the other processes."""
        return OwnNotes()

    # ---------------------------------------------------------------- ending

    def enter(self, verb: str) -> None:
        """Notes what the script has asked for, which other processes must be asked for, too."""

    def take_back(self) -> None:
        """What was entered last was refused."""

    @property
    def has_failed(self) -> bool:
        """Whether another process's failure ends this one."""
        return False

    def stop_together(self, asked: bool, step: int, steps_per_s: float, apart: int) -> bool:
        """Whether to stop after ``step``; asked of one, it is the same step in all.

        ``apart``: how many steps one process may be ahead of another.
        """
        return asked

    def report(self, error: BaseException) -> None:
        """Tells the others why this process ends."""


def refuse_stuck(workers: Iterable[Worker]) -> None:
    """Refuses workers that wait for messages nobody will send."""
    stuck = [worker for worker in workers if worker.pending]
    if stuck:
        lines = [
            f"worker {worker.stage.index} of replica {worker.stage.replica} waits at"
            f" {worker.pending[0]} for {', '.join(map(str, worker.needs(worker.pending[0])))}"
            for worker in stuck
        ]
        raise Deadlock("nobody can go on:\n  " + "\n  ".join(lines))
