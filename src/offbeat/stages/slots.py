"""Slots: the memory of one micro-batch in flight, and the recordings that work on it.

    rule           what a slot keeps                     what its backward reads
    -------------  ------------------------------------  --------------------------------------
    ``current``    activations                           the weights where they are: the newest
    ``stash``      activations, a copy of the weights    that copy
    ``recompute``  the input                             the weights where they are: the newest

Activations are pulled by the stage they are for, gradients are pushed to the slot that waits for
them. So the order of work alone protects every buffer: a slot is written anew only after the
backward that freed it, which waited for the gradient, which was made after the activation had been
copied.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import StageError
from offbeat.nest import Nest
from offbeat.stages.flight import Work
from offbeat.stages.lanes import Instant, Lane, Pool, Recording
from offbeat.stages.network import Network
from offbeat.stages.recorded_update import GatheredGradients, copy_all, without_none
from offbeat.stages.runner import copied_into
from offbeat.stages.versions import Graph, Saved, SavedActivation, weights_set_to

Kind = tuple[Any, ...]
"""What has to be the same for a recording to fit: shapes, layouts, the mode, and whether a batch is
one part, so that the loss's gradient has no factor. Another is read from memory."""


class Slot:
    """Its recordings read and write the same memory every time, whichever batch is in it."""

    forward: Recording
    backward: Recording
    output: Nest
    loss: Tensor | None
    gradients: list[Tensor | None]
    """Of the outputs, as they arrive."""
    sent: list[Tensor | None]
    """Of the inputs."""

    def __init__(
        self,
        kind: Kind,
        given: Nest,
        target: Nest,
        network: Network,
        gathered: GatheredGradients,
        copied: Sequence[nn.Parameter],
        *,
        lent: bool,
    ) -> None:
        """``copied``: the weights of which forwards read a copy; lent by a correction, or today's.

        All slots of a stage put the gradients of the weights into ``gathered``.
        """
        self.kind = kind
        # A clone of a dense tensor has its layout.
        self.given = nest.replace(given, lambda t: t.detach().clone())
        self.target = nest.replace(target, lambda t: t.detach().clone())
        wanted = iter([tensor.requires_grad for tensor in nest.tensors(given)])
        self.leaves = nest.replace(self.given, lambda t: t.detach().requires_grad_(next(wanted)))
        self.draws = True
        """Whether its forward draws random numbers, as far as is known."""
        self.fits = True
        """Whether the modules are still those that were recorded."""
        self.flown: Instant | None = None
        """When its forward has ended; None where its backward is queued behind that anyway."""
        self.landed: Instant | None = None
        """When its memory may be written again; likewise."""
        self._network = network
        self._gathered = gathered
        self._again = network.rule == "recompute"
        self._scale = (
            None if kind[2] else torch.ones((), dtype=torch.float64, device=network.device)
        )
        self._takeoff = Work(target=self.target, scale_at=self._scale, penalized=kind[4])
        """The work before there is a graph: every run of the forward begins from it."""
        if self._again:
            self._takeoff.given = self.leaves
        self._takeoff.copies = copies = {p: p.detach().clone() for p in copied}
        self._lent = list(copies.values()) if lent else None
        if not lent and network.rule == "stash":
            self._takeoff.stashed = copied_into(copies)
        self.work = self._flying = self._takeoff
        self._held: list[Saved | None] = []
        """What its graph saved; recording the backward would let go of it."""

    def record(self, lane: Lane, pool: Pool, arriving: Sequence[bool]) -> None:
        """``arriving``: of every output, whether a gradient comes back; empty where none does.

        ``pool``: memory that the backwards of all slots use in turn, for what they need only while
        they run. What a forward leaves behind is the slot's own until its backward.
        """
        self.forward, (self.output, self.loss) = lane.record(self.run_forward)
        outputs = nest.tensors(self.output)
        self.gradients = [
            torch.empty_like(tensor).detach() if arrives else None
            for tensor, arrives in zip(outputs, arriving or [False] * len(outputs), strict=True)
        ]
        self.backward, self.sent = lane.record(self.run_backward, pool)

    def run_forward(self) -> tuple[Nest, Tensor | None]:
        network = self._network
        if self._again:
            with (
                torch.no_grad(),
                network.buffers.restored(),
                weights_set_to(network.trainable, self._lent),
            ):
                return network.forward(None, self._takeoff, self.leaves, graph=False)
        if self._takeoff.stashed is not None:
            copies = self._takeoff.copies
            copy_all(copies.values(), copies)
        self._flying = replace(self._takeoff, graph=Graph())
        with weights_set_to(network.trainable, self._lent):
            sent = network.forward(None, self._flying, self.leaves, graph=True)
        self.work, self._held = self._flying, self._flying.graph.held()
        return sent

    def run_backward(self) -> list[Tensor | None]:
        if self._again:
            self._flying = replace(self._takeoff, graph=Graph())
            self._network.build_graph(None, self._flying, self.leaves)
        return self._gradients(self._flying)

    def work_again(self) -> Work:
        """What of its flight an unrecorded backward needs under ``recompute``."""
        return replace(self._takeoff, graph=Graph())

    def _gradients(self, work: Work) -> list[Tensor | None]:
        """All gradients of a micro-batch; those of the weights go to their one place."""
        network, newest = self._network, self._gathered.newest
        assert newest is not None
        outputs, starts = network.starts(work, self.gradients)
        inputs = [tensor for tensor in work.inputs if tensor.requires_grad]
        places = [
            (parameter, place)
            for parameter, place in zip(network.trainable, newest, strict=True)
            if place is not None
        ]
        wanted = [*inputs, *(parameter for parameter, _ in places)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        with network.lent_again(work):
            if outputs and wanted:
                found = torch.autograd.grad(outputs, wanted, starts, allow_unused=True)
        of_weights = found[len(inputs) :]
        for (parameter, _), gradient in zip(places, of_weights, strict=True):
            if gradient is None:
                raise uneven(network, parameter)
        copy_all((place for _, place in places), without_none(of_weights))
        of_inputs = iter(found)
        return [next(of_inputs) if tensor.requires_grad else None for tensor in work.inputs]

    def fill(
        self, given: Nest, target: Nest, scale: float, weights: Sequence[Tensor] | None
    ) -> None:
        """Copies a batch to where the recordings read it, and the weights that it is lent."""
        self._takeoff.scale = self.work.scale = scale
        if self._scale is not None:
            self._scale.fill_(scale)
        if self._lent is not None:
            copy_all(self._lent, self._network.trainable if weights is None else weights)
        copy_all(nest.tensors([self.given, self.target]), nest.tensors([given, target]))

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Puts the gradients that arrived where the recording reads them; most are there."""
        if not gradients:
            return
        for place, gradient in zip(self.gradients, gradients, strict=True):
            if (place is None) != (gradient is None):
                raise StageError(
                    f"stage {self._network.index}: the next stage sends a gradient for one"
                    " of its inputs in some batches and none in others, which a recording cannot"
                    " follow. Use engine='serial'."
                )
            if place is not None and gradient is not None and place is not gradient:
                place.copy_(gradient)

    def uncheck(self) -> None:
        """Every replay has written anew what the graph saved, which is no change in place."""
        for saved in self._held:
            if isinstance(saved, SavedActivation):
                saved.version = None


def kind_of(values: Nest) -> Kind:
    if isinstance(values, Tensor):
        return (values.shape, values.stride(), values.dtype, values.requires_grad)
    if values is None:
        return ()
    return (repr(nest.replace(values, kind_of)),)


def uneven(network: Network, parameter: nn.Parameter) -> StageError:
    name = network.names[id(parameter)]
    return StageError(
        f"stage {network.index}: {name} has a gradient in some batches and none in others, but a"
        " recorded update steps the same weights every time. Use engine='serial', or let every"
        " batch use every weight."
    )


def no_penalty(network: Network) -> StageError:
    return StageError(
        f"stage {network.index}: the first part of this batch counts nothing, and it brings the"
        " penalty on weights: a recording has no backward for that. Use engine='serial'."
    )


def deliver(
    gradients: Sequence[Tensor | None], places: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients in the memory of the slot that awaits them, or else in memory of their own."""
    return [
        None if gradient is None else gradient.clone() if place is None else place.copy_(gradient)
        for place, gradient in zip(places, gradients, strict=True)
    ]
