"""How a stage's forwards, backwards and updates are carried out: at once, by autograd."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.nest import Nest
from offbeat.stages.fill import Fill
from offbeat.stages.flight import Flight, Work
from offbeat.stages.network import without_holes
from offbeat.stages.versions import overwritten, weights_set_to

if TYPE_CHECKING:
    from offbeat.stages.stage import Stage


class Direct:
    """A stage keeps the books and asks its runner for the work itself.

    The other runner, :class:`offbeat.stages.recorded.Recorded`, needs to be told more.
    """

    reuses_memory = False
    """Whether later steps write where weights of today and batches in flight lie now."""

    def __init__(self, stage: "Stage") -> None:
        self._stage = stage

    def begin(self, fill: Fill) -> None: ...

    def entered(self, kind: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """The context in which an action of this kind is to be launched."""
        return nullcontext()

    def forward(
        self,
        flight: Flight,
        given: Nest,
        target: Nest,
        scale: float,
        copies: dict[nn.Parameter, Tensor] | None = None,
    ) -> tuple[Nest, Tensor | None]:
        """``copies``: where the weights that the backward needs are copied; None to leave them."""
        stage, network = self._stage, self._stage.network
        work = flight.work = Work(target=target, scale=scale)
        if copies is not None:
            work.copies, work.stashed = copies, copied_into(copies)
        weights: Sequence[Tensor] | None = stage.old_versions.get(flight.version)
        if stage.corrector.active:
            weights = stage.corrector.forward_weights(flight, stage.version, weights)
        flight.lent = weights is not None
        lent = nullcontext() if weights is None else weights_set_to(stage.trainable, weights)
        with lent:
            if network.rule != "recompute":
                return network.forward(flight.batch, work, given, graph=True)
            work.given = given
            work.given_as = [tensor._version for tensor in nest.tensors(given)]
            first = network.habits.inputs_changed is None
            # A loss has a graph, so that one that looks beyond its arguments is seen to. All else
            # has none in any batch: matmul rounds otherwise where a graph is kept.
            with torch.set_grad_enabled(network.has_loss), network.buffers.restored():
                sent = network.forward(flight.batch, work, given, graph=False)
            if first and not network.has_loss:
                network.show_graph(flight.batch, given)
            return sent

    def prepare(self, flight: Flight) -> None:
        """Under ``recompute``: what of a backward needs no gradient from the next stage."""
        work = flight.work
        assert work is not None
        if work.outputs:
            return
        for tensor, before in zip(nest.tensors(work.given), work.given_as or (), strict=False):
            if tensor._version != before:
                raise overwritten(tensor)
        with self._backward_weights(flight):
            self._stage.network.build_graph(flight.batch, work, work.given)

    def backward(self, flight: Flight, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gathers the gradients of the weights and lets the flight land."""
        work = flight.work
        assert work is not None
        laid_out_anew = _kept_as_they_come(work.inputs)
        with self._backward_weights(flight):
            self._stage.network.backward(work, gradients)
        self._stage.flights.land(flight.batch)
        return [laid_out_anew.get(place, t.grad) for place, t in enumerate(work.inputs)]

    def _backward_weights(self, flight: Flight) -> AbstractContextManager[None]:
        """Lends the module what a backward is to see instead of the newest.

        A correction may say so, or a graph that asks the module for weights.
        """
        corrector, work = self._stage.corrector, flight.work
        if work is not None and work.hides:
            trainable = self._stage.trainable
            return weights_set_to(trainable, [work.copies[p] for p in trainable])
        if not corrector.active:
            return nullcontext()
        weights = corrector.backward_weights(self._stage.version - flight.version)
        return weights_set_to(self._stage.trainable, weights)

    def update(self) -> None:
        """Steps the optimizers; what something in flight still needs stays as it is."""
        self._stage.save_version_in_use()
        self._stage.step()

    def show_gradients(self) -> None:
        """Puts the gathered gradients where optimizers look for them: there they are."""

    def drop_gradients(self) -> None: ...

    def discard(self) -> None:
        """Nothing that is in flight will be asked for any more."""

    def look_again(self) -> None:
        """Modules have been changed."""

    def before_snapshot(self) -> None: ...

    def restoring(self) -> AbstractContextManager[None]:
        """Around putting another state in place of this one."""
        return nullcontext()


def copied_into(copies: dict[nn.Parameter, Tensor]) -> Callable[[nn.Parameter], Tensor]:
    """Gives every weight a copy that outlives the next update, once."""

    def copy_of(parameter: nn.Parameter) -> Tensor:
        if parameter not in copies:
            copies[parameter] = parameter.detach().clone()
        return copies[parameter]

    return copy_of


def _kept_as_they_come(inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Will hold the gradients of inputs, by place, that autograd would lay out anew for ``.grad``.

    In an unsplit model the layer before gets them as they are, and its sums go by their layout.
    """
    kept: dict[int, Tensor] = {}

    def keep(place: int, strides: tuple[int, ...], gradient: Tensor) -> None:
        if gradient.layout == torch.strided and gradient.stride() != strides:
            kept[place] = without_holes(gradient)

    for place, tensor in enumerate(inputs):
        if tensor.requires_grad:
            tensor.register_hook(partial(keep, place, tensor.stride()))
    return kept
