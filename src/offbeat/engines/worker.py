"""The only interpreter of schedules: walks a stage's actions, moves messages, writes the ledger."""

from collections import deque
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from offbeat.averaging.averager import Averager, Task
from offbeat.engines.means import Means
from offbeat.engines.setup import Setup
from offbeat.engines.shares import Portion
from offbeat.errors import BatchError
from offbeat.guards import Guard
from offbeat.nest import Nest
from offbeat.schedules.table import Action, Kind
from offbeat.stages.fill import Fill
from offbeat.stages.memory import StageMemory
from offbeat.stages.norms import Norms
from offbeat.stages.stage import Stage
from offbeat.transport.base import Key

if TYPE_CHECKING:
    from offbeat.engines.base import Engine


class Target(NamedTuple):
    """What a stage with a loss needs beside the activation."""

    values: Nest
    checksum: int | None = None
    """Of the batch's targets, to compare with what stage 0 was fed."""


class Worker:
    """Carries out the actions of one stage, in the order they are appended."""

    def __init__(self, stage: Stage, setup: Setup, engine: "Engine") -> None:
        self.stage = stage
        self.transport = engine.transports[stage.replica]
        self.guard = Guard(setup.guards, stage, engine.updates)
        self.averager: Averager | None = None
        if setup.averaging is not None:
            self.averager = Averager(
                setup.averaging,
                stage,
                setup.replicas,
                self.transport,
                engine.ledger,
                engine.placement.stages,
            )
        self.pending: deque[Action | Task] = deque()
        self.step = 0
        """The trainer's step that the pending actions belong to."""
        self._index, self._stages = stage.index, engine.placement.stages
        self._clip, self._faults = setup.clip, setup.faults
        self._means: Means | None = None
        if setup.divides and not (setup.weight.asked_for_rows or setup.weight.is_sum):
            self._means = Means(together=setup.averages_gradients)
        self._write, self._clock = engine.record, engine.clock
        self._listeners = engine.placement.listeners
        """The stages that are told every loss."""
        self._fill = Fill()
        self._first_batch = self._first_update = 0
        self._rebuilds = False
        """Whether a backward has work to do before its gradient is there."""
        self._not_compared: dict[int, Portion] = {}
        """Of micro-batches whose loss has no graph before their backward."""

    def begin(self, fill: Fill) -> None:
        """Starts a fill of the pipe, for the stage, its corrections and its guard."""
        self._fill = fill
        self._first_batch, self._first_update = fill.first_batch, fill.first_update
        self._rebuilds = fill.rule == "recompute" and not fill.plain
        self.stage.begin(fill)
        self.guard.begin(fill.micro_batches)
        self._not_compared.clear()
        if self._means is not None:
            self._means.begin()

    def memory(self) -> StageMemory:
        """What the stage holds, and what its averages do."""
        if self.averager is None:
            return self.stage.memory()
        own = self.averager
        return replace(
            self.stage.memory(), averaging_bytes=own.bytes, average_sends_bytes=own.sent_bytes
        )

    @property
    def began_at(self) -> tuple[int, int]:
        """The batch and the update from which the present fill counts."""
        return self._first_batch, self._first_update

    @property
    def is_last(self) -> bool:
        return self._index == self._stages - 1

    @property
    def _has_loss(self) -> bool:
        return self.is_last or self._fill.local_loss

    def needs(self, action: Action | Task) -> list[Key]:
        """The messages an action waits for."""
        if isinstance(action, Task):
            assert self.averager is not None
            return self.averager.needs(action)
        k, batch = self._index, self._first_batch + action.batch
        if action.kind == "F":
            keys = [Key("activation", k, batch)]
            return [*keys, Key("target", k, batch)] if self._has_loss else keys
        if action.kind == "B":
            return [] if self._has_loss else [Key("gradient", k, batch)]
        return self._norm_keys(action)

    def _norm_keys(self, update: Action) -> list[Key]:
        if (self._clip is None and not self.guard.agrees) or not self._fill.synchronous:
            return []
        number = self._first_update + update.batch
        others = [k for k in range(self._stages) if k != self._index]
        return [Key("norms", self._index, number, source=other) for other in others]

    def ready(self) -> bool:
        """Whether the next action, if there is one, has all its messages."""
        return bool(self.pending) and all(map(self.transport.arrived, self.needs(self.pending[0])))

    def advance(self) -> None:
        """Carries out the next action, waiting for its messages if need be."""
        action = self.pending.popleft()
        try:
            if isinstance(action, Task):
                assert self.averager is not None
                self.averager.carry_out(action)
                self._send_norms()
                return
            if self._faults is not None:
                first = self._first_update if action.kind == "U" else self._first_batch
                self._faults.before(Action(self._index, action.kind, first + action.batch))
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                self._backward(action)
            else:
                self._update(action)
        except Exception as error:
            error.add_note(f"offbeat: this happened at {action} (stage, action, batch).")
            raise

    def _forward(self, action: Action) -> None:
        received = [self.transport.receive(key) for key in self.needs(action)]
        given, checksum, words = received[0]
        portion = Portion(*words)
        target = received[1] if self._has_loss else Target(None)
        if self.is_last:
            _compare_checksums(checksum, target.checksum)
        start, began = self._clock(), perf_counter()
        batch = self._first_batch + action.batch
        version = None if action.version is None else self._first_update + action.version
        read = self.stage.version if version is None else version
        output, loss = self.stage.forward(
            batch, given, target.values, scale=portion.scale, version=version
        )
        self._slow_down(perf_counter() - began)
        end = self._clock()
        if not self.is_last:
            sent = (output, checksum, words)
            self.transport.send(Key("activation", self._index + 1, batch), sent)
        elif loss is not None:
            for stage in self._listeners:
                told = loss if portion.share == 1.0 else portion.of(loss)
                self.transport.send(Key("loss", stage, batch, self._index), told)
        counts = loss is not None and portion.scale > 0.0
        self._record("F", batch, read, start, end, loss if counts else None)
        if loss is not None and counts:
            self.guard.look_at(loss, batch, read)
            self._compare(batch, portion)

    def _compare(self, batch: int, portion: Portion) -> None:
        """What a part counts with what its loss is a mean over, once there is a graph of it."""
        work = self.stage.flights.in_air[batch].work
        # To ask a GPU is to wait for it: in the first step alone.
        cheap = self.stage.device.type == "cpu" or self.step == 0
        if self._means is None or work is None or not cheap:
            return
        if work.scale_at is not None:  # of a recording, which let go of the graph
            return
        if work.loss is None:
            self._not_compared[batch] = portion
            return
        number = (batch - self._first_batch) // self._fill.micro_batches
        self._means.look_at(number, work, portion)

    def _backward(self, action: Action) -> None:
        batch = self._first_batch + action.batch
        began = perf_counter()
        if self._rebuilds:
            self.stage.prepare(batch)
            if (portion := self._not_compared.pop(batch, None)) is not None:
                self._compare(batch, portion)
        prepared = perf_counter() - began
        received = [self.transport.receive(key) for key in self.needs(action)]
        start, began = self._clock(), perf_counter()
        gradients: list[Tensor | None] = self.stage.backward(batch, received[0] if received else [])
        self._slow_down(prepared + perf_counter() - began)
        end = self._clock()
        if self._index > 0 and not self._fill.local_loss:
            self.transport.send(Key("gradient", self._index - 1, batch), gradients)
        self._record("B", batch, self.stage.version, start - prepared, end)
        if self.pending and self.pending[0].kind == "U":
            if self.averager is not None:
                self.pending.extendleft(reversed(self.averager.before_update()))
            self._send_norms()

    def _slow_down(self, elapsed_s: float) -> None:
        if self._faults is not None:
            self._faults.after(self._index, self.step, elapsed_s)

    def _send_norms(self) -> None:
        """Tells the other stages the gradients' norms, if an update comes next and clips by all."""
        update = self.pending[0] if self.pending else None
        if not isinstance(update, Action) or update.kind != "U":
            return
        keys = self._norm_keys(update)
        if keys:
            norms = tuple(self.stage.gradient_norms())
            for key in keys:
                self.transport.send(Key("norms", key.source, key.batch, self._index), norms)

    def _update(self, action: Action) -> None:
        others = [Norms(*self.transport.receive(key)) for key in self.needs(action)]
        start = self._clock()
        number = self._first_update + action.batch
        own = self.stage.gradient_norms() if others or self.guard.looks else None
        applies = own is None or self.guard.before_update(number, own, others)
        if self._clip is not None:
            self.stage.clip(self._clip, own, others)
        self.stage.update()
        if not applies:
            self.guard.after_drop()
        self._record("U", number, self.stage.version, start, self._clock())
        if self.averager is not None:
            self.pending.extendleft(reversed(self.averager.after_update()))

    def _record(
        self,
        kind: Kind,
        number: int,
        version: int,
        start: Any,
        end: Any,
        loss: Tensor | None = None,
    ) -> None:
        self._write(kind, self._index, number, version, start, end, loss, self.stage.replica)

    def predict(
        self, number: int, given: tuple[Nest, float | None], state: dict[str, Tensor]
    ) -> tuple[Nest, float | None] | None:
        """Runs the stage in evaluation; the output at the last one, and what the batch counts.

        ``given``: to the first stage, likewise.
        """
        if self._index > 0:
            given = self.transport.receive(Key("evaluation", self._index, number))
        x, count = given
        output = self.stage.network.predict(x, state)
        if self.is_last:
            return output, count
        self.transport.send(Key("evaluation", self._index + 1, number), (output, count))
        return None


def _compare_checksums(of_inputs: int | None, of_targets: int | None) -> None:
    if of_inputs is not None and of_targets is not None and of_inputs != of_targets:
        raise BatchError(
            f"the first and the last stage were fed different batches (checksums of the targets"
            f" {of_inputs:08x} and {of_targets:08x}), so labels would be wrong. Give every process"
            " the same loader in the same order: seed its shuffling alike, for example with"
            " DataLoader(..., generator=torch.Generator().manual_seed(0))."
        )
