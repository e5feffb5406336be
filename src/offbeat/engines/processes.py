"""The processes engine: some stages of a replica, or whole replicas, here; the others elsewhere."""

import itertools
import json
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from offbeat.averaging.sharding import is_sharded, shards_of
from offbeat.cutting.cut import Cut
from offbeat.elastic.membership import Membership
from offbeat.elastic.restarts import return_number
from offbeat.elastic.survivors import Admission, connect_replicas
from offbeat.engines.agreement import agreed_seed, compare
from offbeat.engines.base import Engine
from offbeat.engines.board import ASKED_BY_ALL, LOST, NOTICED_S, Board, SharedNotes
from offbeat.engines.feed import checksum_of, length_of, pairs_of
from offbeat.engines.machines import Machines
from offbeat.engines.placement import Placement
from offbeat.engines.serial import choose_updates_last
from offbeat.engines.setup import Setup
from offbeat.engines.world import (
    OPEN,
    check_return,
    check_size,
    leave_at_exit,
    say_goodbye,
)
from offbeat.errors import BatchError, ConfigurationError, WorkerLost
from offbeat.guards import Updates
from offbeat.nest import Nest
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings
from offbeat.stages.memory import StageMemory
from offbeat.transport import connect, connect_ring, groups
from offbeat.transport.base import Key
from offbeat.transport.mailbox import Box, Mailbox


class Processes(Engine):
    """Rows of processes, each with one replica of a trainer's or several."""

    way_on = "Start the processes again, and resume() from a checkpoint."

    def __init__(
        self,
        stages: int,
        replicas: int,
        device: torch.device,
        timeout_s: float,
        machines: Machines,
        *,
        outlive: bool = False,
        in_circles: bool = False,
    ) -> None:
        """``outlive``: a replica that dies does not end the others.

        ``in_circles``: replicas average with some of the others only.
        """
        groups.join(timeout_s)
        leave_at_exit()
        self._device = device
        self.timeout_s, self._silence_s = timeout_s, machines.silence
        again = return_number()
        rank = int(os.environ["RANK"]) if again else groups.rank()
        size = int(os.environ["WORLD_SIZE"]) if again else groups.size()
        check_size(size, stages, replicas, outlive)
        counts = machines.counts(stages, max(1, size // replicas), replicas)
        super().__init__(Placement.across(stages, replicas, size, rank, counts))
        placement = self.placement
        self.needs_costs = counts is None and 1 < len(placement.row) < stages
        self.returning = again > 0
        if self.returning:
            check_return(groups.size(), len(placement.row), outlive)
        self._everyone, self._row_group = self._groups()
        # Whose ledgers and the like are put together: whoever cannot die without this process.
        self._company = placement.row if outlive else list(range(size))
        self._company_group = self._row_group if outlive else self._everyone
        life = placement.share + replicas * again if again else None
        row = len(placement.row) if outlive else None
        self._board = Board(rank, size, self._everyone.group_name, timeout_s, row, life)
        # Before connections that only some would make.
        alike = {
            "when_replica_dies": "go on" if outlive else "stop",
            "the placement": counts and list(counts),
            "silence": machines.silence,
        }
        compare(self._board.exchange, rank, alike)
        self._mailbox = self._open_mailbox(groups.store_of(self._everyone), outlive, in_circles)
        self.transports.update(self._mailbox.boxes)
        if not self.needs_costs:
            self._open_averages()
        self._board.watch(self._mailbox, self._company)
        self._lives: dict[int, int] = {}
        """The present ones of replicas that have come back."""
        self._notes = self.notes()
        self._meetings = 0
        OPEN.append((self._board, self._mailbox))
        # A trainer that is dropped says goodbye; its threads end when its neighbours do the same.
        weakref.finalize(self, say_goodbye, self._board, self._mailbox)

    def _groups(self) -> tuple[Any, Any]:
        """All processes, and those of this row."""
        timeout_s, placement = self.timeout_s, self.placement
        everyone = groups.new(range(groups.size()), timeout_s)
        # The world of a replica that has come back is its own row.
        if placement.rows == 1 or self.returning:
            return everyone, everyone
        rows = {tuple(placement.row_of(r)): None for r in range(placement.replicas)}
        return everyone, [groups.new(row, timeout_s) for row in rows][placement.share]

    def place(self, counts: Sequence[int], *, agreed: bool = False) -> None:
        old = self.placement
        if not agreed:  # replicas may count differently, on parts of a batch that differ
            everyone = self._board.exchange("counts", list(counts))
            counts = next(theirs for theirs in everyone if theirs is not LOST)
        self.needs_costs = False
        self.placement = Placement.across(old.stages, old.replicas, self.size, old.rank, counts)
        self._mailbox.stages = self.placement.stages_here
        self._open_averages()
        self.share_in_row("placed", None)  # before anybody sends by it, all go by it

    def _open_averages(self) -> None:
        """Groups for every stage, of the processes that hold it in any row."""
        if self.placement.rows > 1 and self.membership is None:
            columns = [dict.fromkeys(ranks) for ranks in zip(*self.placement.ranks, strict=True)]
            found = [groups.new_patient(list(column), self.timeout_s) for column in columns]
            own, box = {stage: found[stage] for stage in self.placement.stages_here}, self._mailbox
            box.peers = groups.Collectives(own, self._device, box.put, box.lose_peers)

    def _open_mailbox(self, store: Store, outlive: bool, in_circles: bool) -> Mailbox:
        """``store``: where this trainer's links find each other."""
        placement, device, timeout_s = self.placement, self._device, self.timeout_s
        row = PrefixStore(f"row-{placement.share}", store)
        pairs = connect(placement.place, self.share_in_row, row, device, timeout_s)
        mailbox = Mailbox(
            placement.rank,
            placement.stages_here,
            placement.replicas_here,
            {placement.row[place]: pair for place, pair in pairs.items()},
            device=device,
            timeout_s=timeout_s,
            silence_s=self._silence_s,
            stalled=self._board.everyone_waits_for,
        )
        if outlive:
            self.membership = Membership(
                placement,
                mailbox,
                self._board,
                device=device,
                timeout_s=timeout_s,
                silence_s=self._silence_s,
            )
        if self.membership is not None and not self.returning:
            others = connect_replicas(
                placement.share, placement.place, placement.replicas, store, timeout_s
            )
            self.membership.begin(others, placement.share)
        elif placement.rows > 1 and in_circles and self.membership is None:
            ranks, rows = placement.column, placement.rows
            own = PrefixStore("circles", store)
            pairs = connect_replicas(placement.share, placement.place, rows, own, timeout_s)
            mailbox.add_neighbours({ranks[row]: pair for row, pair in pairs.items()})
            mailbox.meet_some(placement.replicas_of_rows, placement.share, ranks)
        elif placement.rows > 1 and self.membership is None:
            ring = PrefixStore(f"place-{placement.place}", store)
            pairs = connect_ring(placement.share, placement.column, ring, timeout_s)
            mailbox.add_neighbours(pairs)
        return mailbox

    def run(self) -> None:
        """The others run theirs, and messages keep them in step."""
        while busy := [worker for worker in self.workers if worker.pending]:
            # One alone waits by itself, with what it can do before a message is there.
            ready = [worker for worker in busy if worker.ready()] if len(busy) > 1 else busy
            if ready:
                choose_updates_last(ready).advance()
            else:
                self._mailbox.await_any([(w.stage.replica, w.needs(w.pending[0])) for w in busy])

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The processes as a grid with the axes "replica" and "stage"; all must ask for it."""
        if return_number():
            raise ConfigurationError(
                "trainer.mesh: this process takes the place of one that died, and the groups of"
                " torch.distributed that it belonged to cannot take it in."
            )
        placement = self.placement
        ranks = torch.arange(self.size).view(placement.rows, -1)
        columns = [groups.new(column.tolist(), self.timeout_s) for column in ranks.T]
        axes = [columns[placement.place], self._row_group]
        return DeviceMesh.from_group(axes, "cpu", ranks, mesh_dim_names=("replica", "stage"))

    # ---------------------------------------------------------------- agreeing

    def share_in_row(self, name: str, value: Any) -> list[Any]:
        """The values of this row's processes, in order."""
        return self._board.exchange(name, value, self.placement.row)

    def agree(self, setup: Setup, cut: Cut, seed: int | None) -> int:
        return agreed_seed(self._board.exchange, self.rank, setup, cut, seed)

    # ---------------------------------------------------------------- data

    def batches(
        self, loader: Iterable[tuple[Nest, Nest]], *, all_need_targets: bool
    ) -> Iterator[tuple[Nest, Nest]]:
        """x for the first stage, y for the last (and for the first, which checks them)."""
        length = length_of(loader)
        lengths = self._board.exchange("lengths", length, self._company)
        for rank, other in zip(self._company, lengths, strict=True):
            if other != lengths[0]:
                raise BatchError(
                    f"the loader has {lengths[0]} batches on rank {self._company[0]} and {other} on"
                    f" rank {rank}:"
                    " give every process the same data."
                )
        placement = self.placement
        first, last = placement.holds_first, placement.holds_last
        if not (first or last or all_need_targets) and length is not None:
            yield from itertools.repeat((None, None), length)
            return
        whole = not is_sharded(loader)
        for x, y in pairs_of(loader, "batches"):
            if whole:
                x, y = (
                    shards_of(part, placement.replicas, placement.rows)[placement.share]
                    for part in (x, y)
                )
            yield x if first else None, y if first or last or all_need_targets else None

    def share_first(self, x: Nest) -> Nest:
        """So that the cut and the heads are decided everywhere alike."""
        transport, own = self._transport, self.placement.stages_here[0]
        if own > 0:
            return transport.receive(Key("batch", own, 0))
        # The furthest first: whoever has it may soon go by another placement.
        for other in reversed(self._other_processes()):
            transport.send(Key("batch", other, 0), x)
        return x

    def refuse_equal_shards(self, x: Nest, y: Nest) -> None:
        """They would learn nothing from each other."""
        if self.placement.rows == 1:
            return
        sums = self._board.exchange("shards", checksum_of([x, y]))
        ends = [(row[0], row[-1]) for row in self.placement.ranks]
        for replica, other in enumerate(ends):
            fed = [(sums[a], sums[b]) for a, b in zip(ends[0], other, strict=True)]
            if other != ends[0] and all(ours == theirs is not LOST for ours, theirs in fed):
                raise BatchError(
                    f"replicas 0 and {replica} were fed the same batch. With replicas in processes"
                    " of their own each takes its part of it: loop over trainer.batches(loader), or"
                    " give the loader batch_sampler=trainer.sampler(data, batch_size)."
                )

    def _other_processes(self) -> list[int]:
        """A stage of every other process of this row."""
        return [stage for stage in self.placement.firsts if stage not in self.placement.stages_here]

    @property
    def _transport(self) -> Box:
        """That of a replica here: the only one, where messages go to other processes."""
        return next(iter(self._mailbox.boxes.values()))

    # ---------------------------------------------------------------- sharing

    def share_result(self, value: Callable[[], Any]) -> Any:
        last, number = self.placement.stages - 1, self.ask()
        if not self.placement.holds_last:
            return self._transport.receive(
                Key("result", self.placement.stages_here[0], number, last)
            )
        result = value()
        for other in self._other_processes():
            self._transport.send(Key("result", other, number, last), result)
        return result

    def gather_memory(self) -> list[StageMemory]:
        own = [asdict(memory) for memory in super().gather_memory()]
        everyone = self._board.exchange("memory", own, self._company)
        return [StageMemory(**memory) for of_rank in everyone for memory in of_rank]

    def merge_ledger(self) -> Ledger:
        """All processes' entries on this machine's clock, in the order in which they ended."""
        clock = time.time() - time.perf_counter()
        clocks = self._board.exchange("clock", clock, self._company)
        ledgers = [Ledger.from_bytes(data) for data in self._share_bytes(self.ledger.to_bytes())]
        older = self._share_bytes(json.dumps(self.ledger.older()).encode())
        for ledger, words in zip(ledgers, older, strict=True):
            ledger.take_older(json.loads(words))
        return Ledger.merged(ledgers, [other - clock for other in clocks])

    def merge_readings(self) -> Readings:
        parts = self._share_bytes(self.readings.to_bytes())
        return Readings.merged(map(Readings.from_bytes, parts))

    def merge_updates(self) -> Updates:
        everyone = Updates()
        for data in self._share_bytes(self.updates.to_bytes()):
            everyone.add_bytes(data)
        return everyone

    def share_tensors(self, tensors: Iterable[Tensor], stage: int) -> list[Tensor]:
        """One stage's tensors, in its whole row; elsewhere ``tensors`` says what to expect."""
        if self.placement.is_whole:
            return list(tensors)
        shared = [tensor.detach().cpu().clone() for tensor in tensors]
        row, rank = self.placement.row, self.placement.ranks[self.placement.replicas_here[0]][stage]
        self._broadcast(shared, self._row_group, row, row.index(rank), "weights")
        return [tensor.to(self._device) for tensor in shared]

    def _share_bytes(self, data: bytes) -> list[bytes]:
        """Every process's bytes, in the order of ranks; where replicas may die, its row's."""
        sizes = self._board.exchange("sizes", len(data), self._company)
        everyone = []
        for place, (rank, size) in enumerate(zip(self._company, sizes, strict=True)):
            buffer = torch.empty(size, dtype=torch.uint8)
            if rank == self.rank and size:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if size:
                self._broadcast([buffer], self._company_group, self._company, place, "records")
            everyone.append(buffer.numpy().tobytes())
        return everyone

    def _broadcast(
        self, tensors: Sequence[Tensor], group: Any, ranks: Sequence[int], place: int, what: str
    ) -> None:
        """From one of ``ranks`` to all; a death or a failure meanwhile ends it in words."""
        started = time.monotonic()

        def failure() -> Exception | None:
            return self._mailbox.failure

        try:
            groups.broadcast(tensors, group, place, failure)
        except WorkerLost:
            raise
        except RuntimeError as error:
            deadline = time.monotonic() + NOTICED_S
            while failure() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            waited_s = time.monotonic() - started
            whose = f"for the {what} of rank {ranks[place]}"
            if ranks[place] == self.rank:
                whose = f"for others to take its {what}"
            raise failure() or WorkerLost(
                f"rank {self.rank} has waited {waited_s:.1f} s {whose}, and the connection broke"
                f" ({str(error).splitlines()[0]}). A process has died, cannot be reached or does"
                f" something else; its own output says what. {ASKED_BY_ALL}"
            ) from error

    # ---------------------------------------------------------------- saving

    def await_messages(self, step: int) -> None:
        """A marker follows what was sent before it along every edge, also where it is passed on."""
        own, others = self.placement.stages_here[0], self._other_processes()
        for other in others:
            self._transport.send(Key("marker", other, step, own), None)
        for other in others:
            self._transport.receive(Key("marker", own, step, other))

    def meet(self, name: str, value: Any = None) -> list[Any]:
        """Every process's value, by rank, or LOST for one that died; a failure ends the wait."""
        deadline = time.monotonic() + self.timeout_s
        self._meetings += 1
        name = f"{name}/{self.joined_at}/{self._meetings}"
        self._notes.tell(name, [value])
        found = self._notes.hear(name, None, lambda: self.has_failed or time.monotonic() > deadline)
        for rank, note in enumerate(found):
            replica = rank // len(self.placement.row)
            life = self._lives.get(replica, replica)
            needed = rank in self._company or not self._board.is_dead(life)
            if note is None and needed:
                missed = WorkerLost(
                    f"rank {rank} did not come to a checkpoint: that process has died, or it takes"
                    f" longer than {self.timeout_s:g} s (timeout={self.timeout_s:g}). Its own"
                    " output says why."
                )
                raise self._mailbox.failure or self._board.failure() or missed
        return [LOST if note is None else note[0] for note in found]

    def welcome(self, admission: Admission) -> None:
        super().welcome(admission)
        for life in (*admission.members, admission.life):
            self._lives[life % self.placement.replicas] = life
        # Counted anew, because a process that has come back has not been at the others' meetings.
        self._meetings, self._notes = 0, self.notes()

    def first_replica(self) -> int:
        """All who are left say the same."""
        if self.size == len(self._company):
            return 0
        came = self.meet("left")  # this process's own row always comes, or the meeting fails
        replicas = range(self.placement.replicas)
        left = (r for r in replicas if all(came[k] is not LOST for k in self.placement.row_of(r)))
        return next(left)

    def enter(self, verb: str) -> None:
        self._board.verbs.enter(verb)

    def take_back(self) -> None:
        self._board.verbs.take_back()

    @property
    def has_failed(self) -> bool:
        return self._mailbox.failure is not None

    def notes(self) -> SharedNotes:
        return self._board.notes(self._lives)

    # ---------------------------------------------------------------- ending

    def stop_together(self, asked: bool, step: int, steps_per_s: float, apart: int) -> bool:
        """The stop lies ``apart`` ahead, and as far as all get until they have seen the request."""
        if asked and self._board.stop_at is None:
            self._board.ask_to_stop(step + apart + ceil(NOTICED_S * steps_per_s))
        return self._board.stop_at is not None and step >= self._board.stop_at

    def report(self, error: BaseException) -> None:
        """Tells the others why this process ends, unless one of them told us.

        A connection also breaks because the process behind it has heard of another's end first:
        then the error says what began it.
        """
        if isinstance(error, WorkerLost):
            first = self._board.say_gone(str(error), error.rank)
            if first is not None and str(first) != str(error):
                error.add_note(f"offbeat: {first}")
        else:
            self._board.report("".join(traceback.format_exception(error)))
            self._board.say_gone(str(error), None)
        self._mailbox.fail(WorkerLost("this process failed earlier."))
