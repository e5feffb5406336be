"""A stage whose operations are recorded once and replayed: the streams engine's.

Every micro-batch in flight has a slot (:mod:`offbeat.stages.slots`): memory of its own, and a
recording of its forward and of its backward on that memory. The gradients and the update of a stage
have one place for all slots. What the recordings read and write is what a stage without them reads
and writes, so the weights are the same bits; only the launching is gone.

A stage has two lanes, so that a batch's forward and an older one's backward run side by side; the
update waits for both, and the next forward for the update.

Predicted weights are copied to where a slot's forward reads them, between replays. A correction of
the update is recorded with it, unless it changes from one to the next.

The first batches of a stage, batches of another shape, and modules that cannot be recorded run
directly, in the same lane.
"""

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.nest import Nest, is_dense
from offbeat.stages.attributes import Attributes, hook_of
from offbeat.stages.fill import Fill
from offbeat.stages.flight import Flight
from offbeat.stages.lanes import Instant, Lane, Lanes, NotRecordable, Pool, Recording
from offbeat.stages.recorded_update import (
    GatheredGradients,
    Numbers,
    RecordedUpdate,
    copy_all,
    numbers_of,
    without_none,
)
from offbeat.stages.runner import Direct
from offbeat.stages.slots import Kind, Slot, deliver, kind_of, no_penalty, uneven

if TYPE_CHECKING:
    from offbeat.stages.stage import Stage

_WARM_UP = 2
"""Times a kind of batch runs unrecorded first: libraries choose and allocate on first use."""
_MOST_KINDS = 4
"""Kinds of batches (by shapes and layouts) that are recorded; others run unrecorded."""


@dataclass(frozen=True)
class _Note:
    """What a backward has to know about its forward."""

    kind: Kind
    places: Sequence[Tensor | None]
    """Where the stage before awaits the gradients of the inputs; None for memory of their own."""
    slot: Slot | None = None
    """None where the batch runs unrecorded."""


class Recorded:
    """Queues a stage's work in its lanes, and replays recordings where it can."""

    reuses_memory = True

    def __init__(self, stage: "Stage", lanes: Lanes) -> None:
        self._stage = stage
        self._direct = Direct(stage)
        self.lanes = lanes
        self.lane = lanes.forward
        self.back = lanes.forward
        """Where backwards and updates go."""
        self.records = True
        """Until something in the stage turns out not to be recordable."""
        self._static = True
        """Whether weights and gradients keep their place."""
        self._flown: Instant | None = None
        self._updated: Instant | None = None
        self._arriving: list[bool] = []
        self._stashed_weights: list[nn.Parameter] = []
        self._begun: tuple[Any, ...] = ()
        self.gathered = GatheredGradients()
        self.recorded_update = RecordedUpdate()
        self._forget_recordings()

    def _forget_recordings(self) -> None:
        self._seen: Counter[Kind] = Counter()
        self.free: dict[Kind, deque[Slot]] = {}
        """The slots of every kind that has been recorded, as far as no batch is in them."""
        self._pool: Pool | None = None
        self.gathered.forget_places()
        self.recorded_update.forget()

    def begin(self, fill: Fill) -> None:
        stage, corrector = self._stage, self._stage.corrector
        places = tuple(parameter.data_ptr() for parameter in stage.parameters)
        corrected, predicted = corrector.active, corrector.predicts
        shrink = fill.shrink * corrector.shrinkage
        begun = (stage.rule, fill.kept_versions, shrink, fill.local_loss, places, corrected,
                 predicted)  # fmt: skip
        if begun == self._begun:
            return
        self._begun = begun
        self._forget_recordings()
        # Where a forward or backward asks for weights by name, recordings cannot follow.
        self._static = self.records and not fill.kept_versions and not corrector.rewinds
        stage.network.keeps_place = self._static
        # A backward that runs no forward again leaves alone what a forward writes, so that the two
        # need not wait for each other; without a lag they are one after the other anyway.
        apart = (
            self._static
            and fill.in_flight > 0
            and fill.rule != "recompute"
            and not corrector.acts_forward
        )
        self.back = self.lanes.backward if apart else self.lane

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        lane = self.lane if kind == "F" else self.back
        with lane.entered():
            yield
            if kind == "U":  # whatever came with it, such as weights that a guard puts back
                self._updated = self._mark(lane)

    # ---------------------------------------------------------------- the three operations

    def forward(
        self, flight: Flight, given: Nest, target: Nest, scale: float
    ) -> tuple[Nest, Tensor | None]:
        stage = self._stage
        if self._updated is not None:
            self.lane.wait(self._updated)
        places = self.lanes.addresses.take(stage.index, flight.batch)
        if places is None:
            places = [None] * len(nest.tensors(given))
        penalized = stage.network.penalizes(flight.batch)
        if penalized and scale == 0.0:
            raise no_penalty(stage.network)
        kind = (
            kind_of(given),
            kind_of(target),
            stage.fill.micro_batches == 1,
            stage.module.training,
            penalized,
        )
        slot = self._slot_for(kind, given, target)
        flight.note = _Note(kind, places, slot)
        if slot is None:
            # What arrives may be memory that the stage before will write again.
            own = nest.replace(given, _copied)
            copies: dict[nn.Parameter, Tensor] | None = None
            if stage.rule == "stash" and self._static:
                copies = {}  # recordings know where the weights are, so no update may move them
            sent = self._direct.forward(flight, own, target, scale, copies)
            self._flown = self._mark(self.lane)
            return sent
        if slot.landed is not None:
            self.lane.wait(slot.landed)
        weights = None
        if stage.corrector.active:
            weights = stage.corrector.forward_weights(flight, stage.version, None)
        flight.lent = weights is not None
        slot.fill(given, target, scale, weights)
        if slot.draws:
            self.lane.seed(stage.network.seed_of(flight.batch))
        slot.forward.replay()
        slot.draws = slot.draws and self.lane.drew()
        slot.flown = self._flown = self._mark(self.lane)
        flight.work = slot.work
        if slot.loss is not None:
            # Nobody answers a stage with a loss, so nothing says when its output was read.
            output = nest.replace(slot.output, _copied) if stage.fill.local_loss else slot.output
            return output, slot.loss.clone()
        self.lanes.addresses.leave(stage.index + 1, flight.batch, slot.gradients)
        return slot.output, None

    def prepare(self, flight: Flight) -> None:
        if _slot_of(flight) is None:  # a slot computes its forward again within its backward
            self._direct.prepare(flight)

    def backward(self, flight: Flight, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        note: _Note = flight.note
        slot = note.slot
        assert flight.work is not None
        if flight.work.scale == 0.0:
            return self._pass_over(flight)
        if slot is None:
            # Autograd runs a backward in the stream of its forward.
            self.lane.wait(self.back.now())
            with self.lane.entered():
                sent = deliver(self._backward_unrecorded(flight, gradients), note.places)
            self.back.wait(self.lane.now())
            return sent
        if slot.flown is not None:
            self.back.wait(slot.flown)
        slot.take(gradients)
        self.gathered.make_room()
        if slot.draws and self._stage.rule == "recompute":
            self.lane.seed(self._stage.network.seed_of(flight.batch))
        slot.backward.replay()
        self._stage.flights.land(flight.batch)
        self.gathered.add(self.back if self.records else None)
        sent = deliver(slot.sent, note.places)
        slot.landed = self._mark(self.back)
        self._release(slot)
        return sent

    def _pass_over(self, flight: Flight) -> list[Tensor | None]:
        """The backward of a part that counts nothing: no gradient comes of it."""
        note: _Note = flight.note
        self._stage.flights.land(flight.batch)
        if note.slot is not None:
            if note.slot.flown is not None:
                self.back.wait(note.slot.flown)
            note.slot.landed = self._mark(self.back)
            self.free[note.slot.kind].append(note.slot)
        return [None] * len(note.places)

    def _mark(self, lane: Lane) -> Instant | None:
        """What the other lane has to wait for; None if this stage has only one."""
        return None if self.back is self.lane else lane.now()

    def update(self) -> None:
        if self._flown is not None:
            self.back.wait(self._flown)  # forwards read the weights that are written now
        if not self._static:
            self._stage.save_version_in_use()
        recording = self._update_recording()
        if recording is None:
            self.show_and_step()
        else:
            recording.replay()
        self.gathered.count = 0

    def _slot_for(self, kind: Kind, given: Nest, target: Nest) -> Slot | None:
        """A free slot for a batch like this one; None if it has to run unrecorded."""
        if not self.records or not self._static:
            return None
        free = self.free.get(kind)
        # Within a step, a slot more than are in flight lets a forward begin before the backward
        # that frees the oldest has ended.
        enough = 1 if self.gathered.count == 0 or self.back is self.lane else 2
        if free and (len(free) >= enough or len(free) + self._taken > self._stage.flights.peak):
            return free.popleft()
        if free is None and not self._may_record(kind):
            return None
        if not all(map(is_dense, nest.tensors([given, target]))):
            return None
        try:
            if self._stage.habits.draws:
                raise NotRecordable("random numbers of Python or NumPy: a replay would not draw")
            if (hook := hook_of(self._stage.modules)) is not None:
                raise NotRecordable(f"the hook {hook}: a replay would not call it")
            if self._stage.habits.hides:
                raise NotRecordable("activation checkpoints, or functions that keep weights")
            attributes = Attributes(self._stage.modules)
            slot = self._record_slot(kind, given, target)
            if changes := attributes.changes():
                attributes.put_back()
                raise NotRecordable(f"attribute {changes[0]}, which a replay would not change")
        except NotRecordable as error:
            self._stop_recording(error)
            return None
        self.free.setdefault(kind, deque())
        return slot

    @property
    def _taken(self) -> int:
        """How many slots have a batch in them."""
        return sum(_slot_of(flight) is not None for flight in self._stage.flights.in_air.values())

    def _may_record(self, kind: Kind) -> bool:
        if self._seen[kind] < _WARM_UP:
            return False
        if len(self.free) < _MOST_KINDS:
            return True
        if len(self.free) == _MOST_KINDS and self._seen[kind] == _WARM_UP:
            warnings.warn(
                f"stage {self._stage.index} has recorded batches of {_MOST_KINDS} different shapes;"
                " others run unrecorded. Give batches of one shape, for example with"
                " drop_last=True.",
                stacklevel=2,
            )
        return False

    def _record_slot(self, kind: Kind, given: Nest, target: Nest) -> Slot:
        stage, lent = self._stage, self._stage.corrector.predicts
        stashed = self._stashed_weights if stage.rule == "stash" else []
        copied = stage.trainable if lent else stashed
        slot = Slot(kind, given, target, stage.network, self.gathered, copied, lent=lent)
        self._pool = self._pool or self.back.pool()
        slot.record(self.lane, self._pool, self._arriving)
        return slot

    def _stop_recording(self, error: NotRecordable) -> None:
        self.records = False
        if not self._taken:
            self.show_gradients()
            self._static = self._stage.network.keeps_place = False
            self._forget_recordings()
        warnings.warn(
            f"stage {self._stage.index} runs unrecorded, on its own stream but without CUDA graphs,"
            f" because of {error}. To record it, remove what makes the CPU wait for the GPU (such"
            " as .item(), or a shape that depends on values) and what only the CPU does (random"
            " numbers, hooks, attributes that a forward changes).",
            stacklevel=2,
        )

    def _backward_unrecorded(
        self, flight: Flight, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        self._seen[flight.note.kind] += 1
        if not self._static:
            return self._direct.backward(flight, gradients)
        assert flight.work is not None
        trainable = self._stage.trainable
        self._stashed_weights = [p for p in trainable if p in flight.work.graph.weights]
        self._arriving = [gradient is not None for gradient in gradients]
        self.gathered.make_room()
        for parameter in trainable:
            parameter.grad = None
        sent = self._direct.backward(flight, gradients)
        found = [parameter.grad for parameter in trainable]
        if self.gathered.newest is None:
            self.gathered.newest = [None if g is None else torch.empty_like(g) for g in found]
        newest = self.gathered.newest
        for parameter, place, gradient in zip(trainable, newest, found, strict=True):
            if (place is None) != (gradient is None):
                raise uneven(self._stage.network, parameter)
        copy_all(without_none(newest), without_none(found))
        self.gathered.add(self.back if self.records else None)
        return sent

    # ---------------------------------------------------------------- gradients and the update

    def show_gradients(self) -> None:
        if self._static:
            self.gathered.show(self._stage.trainable)

    def drop_gradients(self) -> None:
        self.gathered.count = 0

    def show_and_step(self) -> None:
        """What is recorded of an update."""
        self.show_gradients()
        self._stage.step()

    def _update_recording(self) -> Recording | None:
        """The update as a recording; None if it has to run unrecorded."""
        update, stage = self.recorded_update, self._stage
        if not (self.records and self._static and stage.corrector.repeats and update.possible):
            return None
        if not self.gathered.count:
            return None
        return update.recording(
            self._numbers(), stage.optimizers, lambda: self.back.record(self.show_and_step)[0]
        )

    def _numbers(self) -> Numbers:
        stage, corrected = self._stage, None
        if stage.corrector.active:
            corrected = (stage.flights.lag(stage.version), stage.corrector.generation)
        several = self.gathered.count > 1
        return (stage.clip_to, several, corrected, *numbers_of(stage.optimizers))

    def discard(self) -> None:
        for flight in self._stage.flights.in_air.values():
            if (slot := _slot_of(flight)) is not None:
                self._release(slot)
        self.lanes.addresses.clear()
        self.gathered.count = 0
        self.recorded_update.forget()  # optimizers may have got another state

    def _release(self, slot: Slot) -> None:
        if slot.fits:
            self.free[slot.kind].append(slot)

    def look_again(self) -> None:
        for flight in self._stage.flights.in_air.values():
            if (slot := _slot_of(flight)) is None:
                continue
            slot.fits = False  # a graph that is there stays what it is
            if self._stage.rule == "recompute":
                flight.work, flight.note = slot.work_again(), replace(flight.note, slot=None)
        self._seen.clear()
        self.free.clear()
        self._pool = None  # CUDA frees one with the last recording that uses it
        if not self._taken and not self.gathered.count:  # else gradients go where they went
            self._forget_recordings()

    def before_snapshot(self) -> None:
        self.show_gradients()
        for flight in self._stage.flights.in_air.values():
            if (slot := _slot_of(flight)) is not None:
                slot.uncheck()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        self._forget_recordings()  # gradients will lie elsewhere
        self.lane.wait_for_caller()
        with self.lane.entered():  # autograd runs a backward in the stream of its forward
            yield
        self.lane.caller_waits()
        for flight in self._stage.flights.in_air.values():
            work = flight.work
            assert work is not None
            inputs = nest.tensors(work.given if work.leaves is None else work.leaves)
            flight.note = _Note((), [None] * len(inputs))
        gradients = [parameter.grad for parameter in self._stage.trainable]
        if self._static and any(gradient is not None for gradient in gradients):
            self.gathered.newest, self.gathered.count = gradients, 1


def _slot_of(flight: Flight) -> Slot | None:
    note: _Note | None = flight.note  # None while a flight is being put back
    return None if note is None else note.slot


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
