"""A stage whose operations are recorded once and replayed: the streams engine's.

Every micro-batch in flight has a slot: memory of its own, and a recording of its forward and of its
backward on that memory. The gradients and the update of a stage have one place for all slots. What
the recordings read and write is what :class:`Stage` reads and writes, so the weights are the same
bits; only the launching is gone.

    rule           what a slot keeps                     what its backward reads
    -------------  ------------------------------------  --------------------------------------
    ``current``    activations                           the weights where they are: the newest
    ``stash``      activations, a copy of the weights    that copy
    ``recompute``  the input                             the weights where they are: the newest

Activations are pulled by the stage they are for, gradients are pushed to the slot that waits for
them. So the order of work alone protects every buffer: a slot is written anew only after the
backward that freed it, which waited for the gradient, which was made after the activation had been
copied.

A stage has two lanes, so that a batch's forward and an older one's backward run side by side; the
update waits for both, and the next forward for the update.

Predicted weights are copied to where a slot's forward reads them, between replays. A correction of
the update is recorded with it, unless it changes from one to the next.

The first batches of a stage, batches of another shape, and modules that cannot be recorded run as
in :class:`Stage`, in the same lane.
"""

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import StageError
from offbeat.methods.base import Rule
from offbeat.nest import Nest, is_dense
from offbeat.stages.gathered import (
    GatheredGradients,
    Numbers,
    RecordedUpdate,
    copy_all,
    numbers_of,
    tensors_of,
)
from offbeat.stages.lanes import Instant, Lane, NotRecordable, Pool, Recording
from offbeat.stages.memory import StageMemory, Storages
from offbeat.stages.stage import Flight, Stage
from offbeat.stages.versions import Graph, Saved, SavedActivation, weights_set_to

_WARM_UP = 2
"""Times a kind of batch runs unrecorded first: libraries choose and allocate on first use."""
_MOST_KINDS = 4
"""Kinds of batches (shapes, layouts, shares) that are recorded; others run unrecorded."""

_Kind = tuple[Any, ...]


class _Slot:
    """The memory of one micro-batch in flight, and the recordings that work on it."""

    forward: Recording
    backward: Recording
    output: Nest
    loss: Tensor | None
    gradients: list[Tensor | None]
    """Of the outputs, as they arrive."""
    sent: list[Tensor | None]
    """Of the inputs."""
    flown: Instant | None
    """When its forward has ended; None where its backward is queued behind that anyway."""
    landed: Instant | None = None
    """When its memory may be written again; likewise."""

    def __init__(self, kind: _Kind, given: Nest, target: Nest) -> None:
        self.kind = kind
        # A clone of a dense tensor has its layout.
        self.given = nest.replace(given, lambda t: t.detach().clone())
        self.target = nest.replace(target, lambda t: t.detach().clone())
        wanted = iter([tensor.requires_grad for tensor in nest.tensors(given)])
        self.leaves = nest.replace(self.given, lambda t: t.detach().requires_grad_(next(wanted)))
        self.draws = True
        """Whether its forward draws random numbers, as far as is known."""
        self.copies: dict[nn.Parameter, Tensor] = {}
        """The weights its forward read, under ``stash``."""
        self.bytes = sum(tensor.nbytes for tensor in nest.tensors(self.given))
        self.flight: Flight
        self.held: list[Saved | None] = []
        """What its graph saved; recording the backward would let go of it."""
        self.version = 0
        self.lent = False


class GraphStage(Stage):
    """Queues its work in a lane, and replays recordings where it can."""

    def __init__(
        self, index: int, module: nn.Module, *, lanes: tuple[Lane, Lane], **settings: Any
    ) -> None:
        self._lanes = lanes
        self.lane = self.back = lanes[0]
        self._flown: Instant | None = None
        self._updated: Instant | None = None
        self._records = True
        self._static = True  # weights and gradients keep their place
        self._recording = False
        self._addresses: dict[int, list[Tensor | None]] = {}
        self._taken: dict[int, _Slot] = {}
        self._kinds: dict[int, _Kind] = {}
        self._arriving: list[bool] = []
        self._stashed_weights: list[nn.Parameter] = []
        self._followed: tuple[Any, ...] = ()
        self._clip_to: float | None = None
        self._gathered = GatheredGradients()
        self._recorded_update = RecordedUpdate()
        self._forget_recordings()
        super().__init__(index, module, **settings)

    def entered(self, kind: str) -> AbstractContextManager[None]:
        return self.lane.entered() if kind == "F" else self.back.entered()

    def follow(
        self,
        rule: Rule,
        *,
        in_flight: int,
        kept_versions: int = 0,
        shrink: float = 1.0,
        local_loss: bool = False,
    ) -> None:
        super().follow(
            rule,
            in_flight=in_flight,
            kept_versions=kept_versions,
            shrink=shrink,
            local_loss=local_loss,
        )
        places = tuple(parameter.data_ptr() for parameter in self.parameters)
        corrected, predicted = self.corrector.active, self.corrector.predicts
        followed = (self._rule, kept_versions, shrink, local_loss, places, corrected, predicted)
        if followed != self._followed:
            self._followed = followed
            self._forget_recordings()
            # Where a forward or backward asks for weights by name, recordings cannot follow.
            self._static = self._records and not kept_versions and not self.corrector.rewinds
            # A backward that runs no forward again leaves alone what a forward writes, so that the
            # two need not wait for each other; without a lag they are one after the other anyway.
            apart = (
                self._static
                and in_flight > 0
                and rule != "recompute"
                and not self.corrector.acts_forward
            )
            self.back = self._lanes[1] if apart else self.lane

    def discard(self) -> None:
        super().discard()
        for slot in self._taken.values():
            self._free[slot.kind].append(slot)
        self._taken.clear()
        self._addresses.clear()
        self._kinds.clear()
        self._gathered.count = 0
        self._clip_to = None
        self._recorded_update.forget()  # optimizers may have got another state

    def _forget_recordings(self) -> None:
        self._seen: Counter[_Kind] = Counter()
        self._free: dict[_Kind, deque[_Slot]] = {}
        self._pool: Pool | None = None
        self._gathered.forget_places()
        self._recorded_update.forget()

    # ---------------------------------------------------------------- the three operations

    def forward(
        self,
        batch: int,
        given: Nest,
        target: Nest = None,
        *,
        scale: float = 1.0,
        version: int | None = None,
    ) -> tuple[Nest, Tensor | None]:
        if self._updated is not None:
            self.lane.wait(self._updated)
        self._addresses[batch] = [getattr(t, "awaits", None) for t in nest.tensors(given)]
        kind = (_kind(given), _kind(target), scale, self.module.training)
        slot = self._slot_for(kind, given, target)
        if slot is None:
            self._kinds[batch] = kind
            # What arrives may be memory that the stage before will write again.
            own = nest.replace(given, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
            found = super().forward(batch, own, target, scale=scale, version=version)
            self._flown = self._mark(self.lane)
            return found
        if slot.landed is not None:
            self.lane.wait(slot.landed)
        weights = self.corrector.forward_weights(batch, self.version, self.version, None)
        slot.version, slot.lent = self.version, weights is not None
        if self.corrector.predicts:
            used = self._trainable if weights is None else weights
            copy_all(slot.copies.values(), used)
        _copy(slot.given, given)
        _copy(slot.target, target)
        if slot.draws:
            self.lane.seed(self._seed_of(batch))
        slot.forward.replay()
        slot.draws = slot.draws and self.lane.drew()
        slot.flown = self._flown = self._mark(self.lane)
        self._taken[batch] = slot
        self._peak = max(self._peak, self.in_flight)
        # Nobody answers a stage with a loss of its own, so nothing says when its output was read.
        output = nest.replace(slot.output, _copied) if self._local_loss else slot.output
        return output, None if slot.loss is None else slot.loss.clone()

    def prepare(self, batch: int) -> None:
        if batch not in self._taken:  # a slot computes its forward again within its backward
            super().prepare(batch)

    def backward(self, batch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        slot = self._taken.pop(batch, None)
        places = self._addresses.pop(batch)
        if slot is None:
            # Autograd goes back where it went forward.
            self.lane.wait(self.back.now())
            with self.lane.entered():
                sent = _delivered(self._backward_unrecorded(batch, gradients), places)
            self.back.wait(self.lane.now())
            return sent
        if slot.flown is not None:
            self.back.wait(slot.flown)
        self._take(gradients, slot)
        self._gathered.make_room()
        if slot.draws and self._rule == "recompute":
            self.lane.seed(self._seed_of(batch))
        slot.backward.replay()
        self.corrector.arrived(batch)
        self._gathered.add(self._where_to_record)
        sent = _delivered(slot.sent, places)
        slot.landed = self._mark(self.back)
        self._free[slot.kind].append(slot)
        return sent

    def _mark(self, lane: Lane) -> Instant | None:
        """What the other lane has to wait for; None if this stage has only one."""
        return None if self.back is self.lane else lane.now()

    def clip(self, max_norm: float, norms: Sequence[Tensor] | None = None) -> None:
        if norms is None:
            self._clip_to = max_norm  # a part of the update, to be recorded with it
        else:
            self._show_gradients()
            super().clip(max_norm, norms)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._gathered.count = 0

    def gradient_norms(self) -> Tensor:
        if not self._recording:
            self._show_gradients()
        return super().gradient_norms()

    def update(self) -> None:
        if self._flown is not None:
            self.back.wait(self._flown)  # forwards read the weights that are written now
        self._save_version_in_use()
        recording = self._update_recording()
        if recording is None:
            self._clip_and_step()
        else:
            recording.replay()
        self._gathered.count = 0
        self._clip_to = None
        self._end_update()
        self._updated = self._mark(self.back)

    # ---------------------------------------------------------------- slots

    def _slot_for(self, kind: _Kind, given: Nest, target: Nest) -> _Slot | None:
        """A free slot for a batch like this one; None if it has to run unrecorded."""
        if not self._records or not self._static:
            return None
        free = self._free.get(kind)
        # Within a step, a slot more than are in flight lets a forward begin before the backward
        # that frees the oldest has ended.
        enough = 1 if self._gathered.count == 0 or self.back is self.lane else 2
        if free and (len(free) >= enough or len(free) + len(self._taken) > self._peak):
            return free.popleft()
        if free is None and not self._may_record(kind):
            return None
        if not all(map(is_dense, nest.tensors([given, target]))):
            return None
        try:
            self._recording = True
            slot = self._record_slot(kind, given, target)
        except NotRecordable as error:
            self._stop_recording(error)
            return None
        finally:
            self._recording = False
        self._free.setdefault(kind, deque())
        return slot

    def _may_record(self, kind: _Kind) -> bool:
        if self._seen[kind] < _WARM_UP:
            return False
        if len(self._free) < _MOST_KINDS:
            return True
        if len(self._free) == _MOST_KINDS and self._seen[kind] == _WARM_UP:
            warnings.warn(
                f"stage {self.index} has recorded batches of {_MOST_KINDS} different shapes; others"
                " run unrecorded. Give batches of one shape, for example with drop_last=True.",
                stacklevel=2,
            )
        return False

    def _record_slot(self, kind: _Kind, given: Nest, target: Nest) -> _Slot:
        slot = _Slot(kind, given, target)
        scale: float = kind[2]
        again = self._rule == "recompute"
        # What a slot's forward leaves behind is its own until its backward. What a backward needs
        # only for itself may lie where the other slots' backwards have theirs.
        self._pool = self._pool or self.back.pool()
        stashed = lent = None
        if self.corrector.predicts:
            slot.copies = {p: p.detach().clone() for p in self._trainable}
            lent = list(slot.copies.values())
        elif self._rule == "stash":
            slot.copies = {p: torch.empty_like(p).detach() for p in self._stashed_weights}
            stashed = slot.copies.__getitem__
        takeoff = Flight(
            version=self.version, given=None, target=slot.target, scale=scale, stashed=stashed
        )
        flight = slot.flight = takeoff

        def fly() -> tuple[Nest, Tensor | None]:
            nonlocal flight
            flight = replace(takeoff, graph=Graph())
            return self._build_graph(0, flight, slot.leaves)

        def run_forward() -> tuple[Nest, Tensor | None]:
            if again:
                with (
                    torch.no_grad(),
                    self._buffers.restored(),
                    weights_set_to(self._trainable, lent),
                ):
                    output, loss = self._run(0, takeoff, slot.leaves)
            else:
                if stashed is not None:
                    copy_all(slot.copies.values(), slot.copies)
                with weights_set_to(self._trainable, lent):
                    output, loss = fly()
                slot.flight, slot.held = flight, flight.graph.held()
                slot.bytes = _bytes_of(flight, self.parameters) or slot.bytes
            return self._outgoing(output, slot.leaves), None if loss is None else loss.detach()

        def run_backward() -> list[Tensor | None]:
            if again:
                fly()
            return self._gradients(flight, slot.gradients)

        slot.forward, (slot.output, slot.loss) = self.lane.record(run_forward)
        outputs = nest.tensors(slot.output)
        slot.gradients = [
            torch.empty_like(tensor).detach() if arrives else None
            for tensor, arrives in zip(
                outputs, self._arriving or [False] * len(outputs), strict=True
            )
        ]
        slot.backward, slot.sent = self.lane.record(run_backward, self._pool)
        for tensor, place in zip(outputs, slot.gradients, strict=True):
            tensor.awaits = place  # type: ignore[attr-defined]
        return slot

    def _gradients(self, flight: Flight, arrived: Sequence[Tensor | None]) -> list[Tensor | None]:
        """All gradients of a micro-batch; those of the weights go to their one place."""
        outputs, starts = self._starts(flight, arrived)
        inputs = [tensor for tensor in flight.inputs if tensor.requires_grad]
        assert self._gathered.newest is not None
        places = [
            (parameter, place)
            for parameter, place in zip(self._trainable, self._gathered.newest, strict=True)
            if place is not None
        ]
        wanted = [*inputs, *(parameter for parameter, _ in places)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if outputs and wanted:
            found = torch.autograd.grad(outputs, wanted, starts, allow_unused=True)
        of_weights = found[len(inputs) :]
        for (parameter, _), gradient in zip(places, of_weights, strict=True):
            if gradient is None:
                raise self._uneven(parameter)
        copy_all((place for _, place in places), tensors_of(of_weights))
        of_inputs = iter(found)
        return [next(of_inputs) if tensor.requires_grad else None for tensor in flight.inputs]

    def _take(self, gradients: Sequence[Tensor | None], slot: _Slot) -> None:
        """Puts the gradients that arrived where the recording reads them; most are there."""
        if not gradients:
            return
        for place, gradient in zip(slot.gradients, gradients, strict=True):
            if (place is None) != (gradient is None):
                raise StageError(
                    f"stage {self.index}: the next stage sends a gradient for one of its inputs in"
                    " some batches and none in others, which a recording cannot follow. Use"
                    " engine='serial'."
                )
            if place is not None and gradient is not None and place is not gradient:
                place.copy_(gradient)

    def _random_numbers(self, batch: int) -> AbstractContextManager[None]:
        # A recording draws from the lane's generator, which every replay seeds.
        return nullcontext() if self._recording else super()._random_numbers(batch)

    def _stop_recording(self, error: NotRecordable) -> None:
        self._records = False
        if not self._taken:
            self._show_gradients()
            self._static = False
            self._forget_recordings()
        warnings.warn(
            f"stage {self.index} runs unrecorded, on its own stream but without CUDA graphs,"
            f" because of {error}. To record it, remove what makes the CPU wait for the GPU (such"
            " as .item(), or a shape that depends on values).",
            stacklevel=2,
        )

    # ---------------------------------------------------------------- unrecorded batches

    def _flight(self, *, version: int, given: Nest, target: Nest, scale: float) -> Flight:
        flight = super()._flight(version=version, given=given, target=target, scale=scale)
        if self._rule == "stash" and self._static:
            copies: dict[nn.Parameter, Tensor] = {}
            # Recordings know where the weights are, so that no update may move them.
            flight.stashed = lambda p: copies.setdefault(p, p.detach().clone())
        return flight

    def _save_version_in_use(self) -> None:
        if not self._static:
            super()._save_version_in_use()

    def _backward_unrecorded(
        self, batch: int, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        self._seen[self._kinds.pop(batch)] += 1
        if not self._static:
            return super().backward(batch, gradients)
        flight = self._flights[batch]
        self._stashed_weights = [p for p in self._trainable if p in flight.graph.weights]
        self._arriving = [gradient is not None for gradient in gradients]
        self._gathered.make_room()
        for parameter in self._trainable:
            parameter.grad = None
        sent = super().backward(batch, gradients)
        found = [parameter.grad for parameter in self._trainable]
        if self._gathered.newest is None:
            self._gathered.newest = [None if g is None else torch.empty_like(g) for g in found]
        newest = self._gathered.newest
        for parameter, place, gradient in zip(self._trainable, newest, found, strict=True):
            if (place is None) != (gradient is None):
                raise self._uneven(parameter)
        copy_all(tensors_of(newest), tensors_of(found))
        self._gathered.add(self._where_to_record)
        return sent

    def _uneven(self, parameter: nn.Parameter) -> StageError:
        name = next(n for m in self.modules for n, p in m.named_parameters() if p is parameter)
        return StageError(
            f"stage {self.index}: {name} has a gradient in some batches and none in others, but a"
            " recorded update steps the same weights every time. Use engine='serial', or let every"
            " batch use every weight."
        )

    # ---------------------------------------------------------------- gradients and the update

    @property
    def _where_to_record(self) -> Lane | None:
        return self.back if self._records else None

    def _show_gradients(self) -> None:
        if self._static:
            self._gathered.show(self._trainable)

    def _clip_and_step(self) -> None:
        self._show_gradients()
        if self._clip_to is not None:
            super().clip(self._clip_to)
        self._step_optimizers()

    def _update_recording(self) -> Recording | None:
        """The update as a recording; None if it has to run unrecorded."""
        update = self._recorded_update
        if not (self._records and self._static and self.corrector.repeats and update.possible):
            return None
        if not self._gathered.count:
            return None
        return update.recording(self._numbers(), self.optimizers, self._record_update)

    def _record_update(self) -> Recording:
        try:
            self._recording = True
            return self.back.record(self._clip_and_step)[0]
        finally:
            self._recording = False

    def _numbers(self) -> Numbers:
        corrected = None
        if self.corrector.active:
            corrected = (self.corrector.lag_at(self.version), self.corrector.made)
        several = self._gathered.count > 1
        return (self._clip_to, several, corrected, *numbers_of(self.optimizers))

    # ---------------------------------------------------------------- what is in flight

    @property
    def in_flight(self) -> int:
        return len(self._flights) + len(self._taken)

    reuses_memory = True

    def flights(self) -> Iterator[tuple[int, Flight, list[Saved | None]]]:
        yield from super().flights()
        given = self._rule == "recompute"
        for batch, slot in self._taken.items():
            flight = replace(
                slot.flight,
                version=slot.version,
                given=slot.leaves if given else None,
                lent=slot.lent,
            )
            for saved in slot.held:
                if isinstance(saved, SavedActivation):
                    saved.version = None  # every replay has written it anew
            yield batch, flight, slot.held

    def snapshot(self) -> dict[str, Any]:
        self._show_gradients()
        return super().snapshot()

    def restore(self, state: dict[str, Any]) -> None:
        self._forget_recordings()  # gradients will lie elsewhere
        self.lane.wait_for_caller()
        with self.lane.entered():  # autograd goes back where it went forward
            super().restore(state)
        self.lane.caller_waits()
        for batch, flight in self._flights.items():
            inputs = nest.tensors(flight.given if flight.leaves is None else flight.leaves)
            self._addresses[batch] = [None] * len(inputs)
            self._kinds[batch] = ()
        gradients = [parameter.grad for parameter in self._trainable]
        if self._static and any(gradient is not None for gradient in gradients):
            self._gathered.newest, self._gathered.count = gradients, 1

    def memory(self) -> StageMemory:
        found = super().memory()
        taken = list(self._taken.values())
        copies = sum(bool(slot.copies) for slot in taken)
        again = self._rule == "recompute"
        return replace(
            found,
            weight_copies=found.weight_copies + copies,
            peak_weight_copies=max(found.peak_weight_copies, found.weight_copies + copies),
            graphs=found.graphs + (0 if again else len(taken)),
            inputs=found.inputs + (len(taken) if again else 0),
            weight_bytes=found.weight_bytes
            + sum(copy.nbytes for slot in taken for copy in slot.copies.values()),
            in_flight_bytes=found.in_flight_bytes + sum(slot.bytes for slot in taken),
        )


def _kind(values: Nest) -> _Kind:
    """What has to be the same for a recording to fit."""
    if isinstance(values, Tensor):
        return (values.shape, values.stride(), values.dtype, values.requires_grad)
    if values is None:
        return ()
    return (repr(nest.replace(values, _kind)),)


def _copy(places: Nest, values: Nest) -> None:
    for place, value in zip(nest.tensors(places), nest.tensors(values), strict=True):
        place.copy_(value.detach())


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _delivered(
    gradients: Sequence[Tensor | None], places: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients in the memory of the slot that awaits them, or else in memory of their own."""
    return [
        None if gradient is None else gradient.clone() if place is None else place.copy_(gradient)
        for place, gradient in zip(places, gradients, strict=True)
    ]


def _bytes_of(flight: Flight, parameters: Sequence[nn.Parameter]) -> int:
    storages = Storages(parameters)
    storages.add_graph(flight.graph)
    return storages.other_bytes
