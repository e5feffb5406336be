"""A stage: a slice of the model with its optimizer, weight versions and batches in flight."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat import nest
from offbeat.corrections.corrector import Corrector
from offbeat.errors import StageError
from offbeat.methods.base import Rule
from offbeat.nest import Nest, is_dense
from offbeat.rng import seed_for, seeded
from offbeat.stages.buffers import WrittenBuffers
from offbeat.stages.compiled import Compiled
from offbeat.stages.memory import StageMemory, Storages
from offbeat.stages.versions import (
    Graph,
    Saved,
    SavedTensors,
    Stashed,
    give_each_its_own,
    move_to_fresh_storage,
    overlapping,
    overwritten,
    weights_set_to,
)

Loss = Callable[[Nest, Nest], Tensor]


@dataclass(kw_only=True)
class Flight:
    """A micro-batch between its forward and its backward."""

    version: int
    given: Nest
    target: Nest
    scale: float
    given_as: list[int] | None = None
    """The version counters of what was given, where it is needed again; None if nobody looked."""
    lent: bool = False
    """Whether its forward used weights with a storage of their own, which no update writes."""
    graph: Graph = field(default_factory=Graph)
    stashed: Stashed | None = None
    leaves: Nest = None
    """The graph's input, as leaves of it: ``inputs`` in their nest."""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None


class Stage:
    """``forward``, ``backward`` and ``update`` of one slice of the model.

    The caller decides the order; the stage knows which weights each backward sees. ``loss`` is set
    where a loss is computed: at the last stage, and with ``head`` at every stage of DGL.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        seed: int,
        device: torch.device,
        replica: int = 0,
        loss: Loss | None = None,
        head: nn.Module | None = None,
        autocast: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self.index = index
        self.module = module
        self._compiled = Compiled(index, module) if compile else module
        self.version = 0
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.corrector = Corrector()
        self._loss = loss
        self._head = head
        self._seed = seed
        self.replica = replica
        self._device = device
        self._autocast = autocast
        self.modules = [module] if head is None else [module, head]
        self.parameters = [p for m in self.modules for p in m.parameters()]
        self._trainable = [p for p in self.parameters if p.requires_grad]
        self.names = {id(p): n for m in self.modules for n, p in m.named_parameters()}
        """What parameters are called in messages; those who know the whole model know better."""
        self.norm_order: list[int] | None = None
        """Where the norms of all stages' gradients come in the order of the unsplit model's
        parameters; None if that is theirs already. Sums of squares go by it."""
        self._flights: dict[int, Flight] = {}
        self._peak = 0
        self._peak_versions = 1
        self._old: dict[int, list[Tensor]] = {}
        self._inputs_changed: bool | None = None
        self._buffers = WrittenBuffers(self.modules)
        self._rebuildable = False
        """Whether its graphs are known to hold nothing that a snapshot would miss."""
        self.follow("stash", in_flight=0)

    def follow(
        self,
        rule: Rule,
        *,
        in_flight: int,
        kept_versions: int = 0,
        shrink: float = 1.0,
        local_loss: bool = False,
    ) -> None:
        """Sets what a method decides; only between a drain and the next forward."""
        # With nothing in flight across an update all rules are plain autograd.
        plain = in_flight == 0 and kept_versions == 0
        self._rule: Rule | None = None if plain else rule
        lends_other_weights = self.corrector.predicts or self.corrector.rewinds
        if kept_versions or self._rule == "stash" or (lends_other_weights and not plain):
            self._refuse_overlapping()  # weights will move
            give_each_its_own(self.parameters)
        compiled = self.modules if isinstance(self._compiled, Compiled) else ()
        self._saved = SavedTensors(self.index, self.parameters, rule, compiled)
        self._kept_versions = kept_versions
        self._shrink = shrink
        self._local_loss = local_loss
        self._old.clear()

    def _refuse_overlapping(self) -> None:
        named = ((self.names[id(p)], p) for p in dict.fromkeys(self.parameters))
        for one, other in overlapping(named):
            raise StageError(
                f"stage {self.index}: {one!r} and {other!r} are two parameters in the same memory,"
                " and this stage lags and keeps versions of each by itself, so that an update of"
                " one would no longer reach the other. Tie them by assigning one nn.Parameter to"
                " both modules, or give each its own: nn.Parameter(view.clone())."
            )

    def entered(self, kind: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """The context in which an action of this kind is to be launched."""
        return nullcontext()

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
        """Runs the stage on one micro-batch; returns what travels on, and the loss if there is one.

        ``scale`` multiplies the loss's gradient; ``version`` asks for older weights.
        """
        read = self.version if version is None else version
        flight = self._flight(version=read, given=given, target=target, scale=scale)
        if read != self.version and read not in self._old:
            raise StageError(
                f"stage {self.index}: batch {batch} asks for version {read} of the weights; there"
                f" are {sorted(self._old)} and the newest, {self.version}."
            )
        old = self._old.get(read)
        weights = self.corrector.forward_weights(batch, read, self.version, old)
        flight.lent = weights is not None
        with weights_set_to(self._trainable, weights):
            if self._rule == "recompute":
                flight.given_as = [tensor._version for tensor in nest.tensors(given)]
                with torch.no_grad(), self._buffers.restored():
                    output, loss = self._run(batch, flight, given)
            else:
                flight.given = None
                output, loss = self._build_graph(batch, flight, given)
        self._flights[batch] = flight
        self._peak = max(self._peak, len(self._flights))
        return self._outgoing(output, given), None if loss is None else loss.detach()

    def prepare(self, batch: int) -> None:
        """Builds the graph of a micro-batch anew at the newest weights, where the rule says so.

        It needs no gradient from the next stage, so it can be done while that is on its way.
        """
        flight = self._flights[batch]
        if self._rule == "recompute" and not flight.outputs:
            given = nest.tensors(flight.given)
            for tensor, before in zip(given, flight.given_as or (), strict=False):
                if tensor._version != before:
                    raise overwritten(tensor)
            with self._backward_weights(batch):
                self._build_graph(batch, flight, flight.given)

    def backward(self, batch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds a micro-batch's gradient to the weights'; returns the gradients of its inputs."""
        self.prepare(batch)
        flight = self._flights[batch]
        outputs, starts = self._starts(flight, gradients)
        laid_out_anew = _kept_as_they_come(flight.inputs)
        with self._backward_weights(batch):
            if outputs:
                torch.autograd.backward(outputs, starts)
        self.corrector.arrived(batch)
        del self._flights[batch]
        return [laid_out_anew.get(place, t.grad) for place, t in enumerate(flight.inputs)]

    def update(self) -> None:
        """Applies the gathered gradients: one optimizer step, one more version."""
        self._save_version_in_use()
        self._step_optimizers()
        self._end_update()

    def _step_optimizers(self) -> None:
        with self.corrector.update(self.version):
            for optimizer in self.optimizers:
                optimizer.step()

    def _end_update(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None
        for scheduler in self.schedulers:
            scheduler.step()
        self.version += 1
        self.corrector.observe()
        alive = {f.version for f in self._flights.values() if f.graph.weights} | set(self._old)
        if self._rule == "stash" or self._kept_versions:
            self._peak_versions = max(self._peak_versions, len(alive | {self.version}))

    def predict(self, given: Nest, state: dict[str, Tensor]) -> Nest:
        """Runs the module alone with these weights and buffers: for evaluation."""
        with torch.no_grad(), precision(self._device, self._autocast):
            return nest.replace(functional_call(self.module, state, (given,)), _without_holes)

    # ---------------------------------------------------------------- between backward and update

    def drop_gradients(self) -> None:
        """Lets the next update apply nothing."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradient_norms(self) -> Tensor:
        """The norm of every gradient, in the order of the parameters."""
        found = [p.grad for p in self._trainable if p.grad is not None]
        gradients = [g.coalesce().values() if g.is_sparse else g for g in found]
        if not gradients:
            return torch.zeros(0, device=self._device)
        return torch.stack(torch._foreach_norm(gradients))

    def clip(self, max_norm: float, norms: Sequence[Tensor] | None = None) -> None:
        """Scales the gradients so that all ``norms`` together come to at most ``max_norm``.

        By default the stage's own alone; every stage's, in order, give the bits of
        ``torch.nn.utils.clip_grad_norm_`` on the whole model.
        """
        found = [norm for norm in norms or [self.gradient_norms()] if norm.numel()]
        if not found:  # a stage without parameters
            return
        together = torch.cat(found)
        if self.norm_order is not None and len(together) == len(self.norm_order):
            together = together[self.norm_order]
        total = torch.linalg.vector_norm(together)
        torch.nn.utils.clip_grads_with_norm_(self._trainable, max_norm, total)

    # ---------------------------------------------------------------- in detail

    def _flight(self, *, version: int, given: Nest, target: Nest, scale: float) -> Flight:
        return Flight(version=version, given=given, target=target, scale=scale)

    def _starts(
        self, flight: Flight, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where a backward begins, and with which gradients."""
        if flight.loss is not None:
            whole = flight.scale == 1.0
            return [flight.loss], [None if whole else torch.full_like(flight.loss, flight.scale)]
        pairs = [
            (output, gradient if self._shrink == 1.0 else gradient * self._shrink)
            for output, gradient in zip(flight.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _build_graph(self, batch: int, flight: Flight, given: Nest) -> tuple[Nest, Tensor | None]:
        leaves = nest.replace(given, lambda t: t.detach().requires_grad_(t.requires_grad))
        flight.leaves, flight.inputs = leaves, nest.tensors(leaves)
        watched: AbstractContextManager[None] = nullcontext()
        if self._rule in ("stash", "current"):
            watched = self._saved.kept_in(flight.graph, flight.inputs, flight.stashed)
        with watched:
            output, loss = self._run(batch, flight, leaves)
        flight.outputs = nest.tensors(output)
        flight.loss = loss
        if self._rule in ("stash", "current"):
            self._saved.look_at(flight.outputs)
        return output, loss

    def _run(self, batch: int, flight: Flight, given: Nest) -> tuple[Nest, Tensor | None]:
        with self._random_numbers(batch), precision(self._device, self._autocast):
            output = self._call(given)
            if not nest.tensors(output):
                raise StageError(
                    f"stage {self.index} ({_describe(self.module)}) returned"
                    f" {type(output).__name__} without a tensor in it. A stage must return a tensor"
                    " or a nest (tuple, list, dict) with at least one."
                )
            loss = self._compute_loss(output, flight.target)
        found = nest.stranger(output)
        if found is not None:
            raise StageError(
                f"stage {self.index} ({_describe(self.module)}) returned a {type(found).__name__},"
                " in which tensors could hide from the boundary between stages. Return tensors,"
                " None, numbers and strings in tuples, lists and dicts."
            )
        return output, loss

    def _random_numbers(self, batch: int) -> AbstractContextManager[None]:
        return seeded(self._seed_of(batch), self._device)

    def _seed_of(self, batch: int) -> int:
        return seed_for(self._seed, replica=self.replica, stage=self.index, micro_batch=batch)

    def _call(self, given: Nest) -> Nest:
        """Calls the module so that a layer that writes in place spoils nobody's tensor.

        The first call works on a copy and looks whether the module wrote into it; only modules that
        do go on paying for a copy.
        """
        passed = given
        if self._inputs_changed is not False:
            passed = nest.replace(given, lambda t: t.clone())
        before = [tensor._version for tensor in nest.tensors(passed)]
        # Compiled code would hide its operations from the inspection of a first graph.
        inspected = self._rule in (None, "recompute") or self._saved.inspected
        output = self._compiled(passed) if inspected else self.module(passed)
        changed = before != [tensor._version for tensor in nest.tensors(passed)]
        if changed and self._inputs_changed is False:
            raise StageError(
                f"stage {self.index} ({_describe(self.module)}) began to change its input in place"
                " after its first batch. Use the out-of-place form of that operation."
            )
        if self._inputs_changed is None:
            self._inputs_changed = changed
        return output

    def _compute_loss(self, output: Nest, target: Nest) -> Tensor | None:
        if self._loss is None or (self._head is not None and not self._local_loss):
            return None
        loss = self._loss(output if self._head is None else self._head(output), target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise StageError(
                f"the loss must return one floating-point number as a tensor; it returned"
                f" {found}. Reduce it, for example with reduction='mean' or .mean()."
            )
        return loss

    def _outgoing(self, output: Nest, given: Nest) -> Nest:
        """Detached tensors for the next stage, marked where a gradient should come back."""
        needed = not self._local_loss and (
            bool(self._trainable) or any(t.requires_grad for t in nest.tensors(given))
        )

        def outgoing(tensor: Tensor) -> Tensor:
            # Without a graph (recompute) any floating-point output may turn out to need one.
            wanted = tensor.requires_grad or (
                self._rule == "recompute" and (tensor.is_floating_point() or tensor.is_complex())
            )
            return _without_holes(tensor.detach()).requires_grad_(needed and wanted)

        return nest.replace(output, outgoing)

    # ---------------------------------------------------------------- versions and memory

    def _backward_weights(self, batch: int) -> AbstractContextManager[None]:
        """Lends the module what a correction wants a backward to see instead of the newest."""
        weights = self.corrector.backward_weights(batch, self.version)
        return weights_set_to(self._trainable, weights)

    def _save_version_in_use(self) -> None:
        """Lets the update write beside the values that something in flight still needs."""
        if self._kept_versions:
            self._old[self.version] = move_to_fresh_storage(self._trainable)
            for version in [v for v in self._old if v <= self.version - self._kept_versions]:
                del self._old[version]
        elif self._rule == "stash":
            flights = [f for f in self._flights.values() if not f.lent]
            graphs = [f.graph for f in flights if f.version == self.version]
            needed = set().union(*(graph.weights for graph in graphs))
            move_to_fresh_storage(p for p in self._trainable if p in needed)

    def discard(self) -> None:
        """Forgets everything in flight, and gradients that were not applied."""
        self._flights.clear()
        self._old.clear()
        self.corrector.forget()
        for parameter in self.parameters:
            parameter.grad = None

    def snapshot(self) -> dict[str, Any]:
        """All that later steps depend on, in plain values and tensors that no step overwrites."""
        from offbeat.stages import snapshot

        return snapshot.take(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what :meth:`snapshot` took; the method must be set already (:meth:`follow`)."""
        from offbeat.stages import snapshot

        snapshot.put_back(self, state)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    reuses_memory = False
    """Whether later steps write where weights of today and batches in flight lie now."""

    def flights(self) -> Iterator[tuple[int, Flight, list[Saved | None]]]:
        """Every micro-batch in flight, and what its graph saved, in order."""
        for batch, flight in self._flights.items():
            yield batch, flight, flight.graph.held()

    def memory(self) -> StageMemory:
        storages = Storages(self.parameters)
        for old in self._old.values():
            for parameter, values in zip(self._trainable, old, strict=True):
                storages.add_version(parameter, values)
        for lent in self.corrector.predicted_in_flight():
            for parameter, values in zip(self._trainable, lent, strict=True):
                storages.add_version(parameter, values)
        for flight in self._flights.values():
            storages.add_graph(flight.graph)
            storages.add_tensors(nest.tensors(flight.given))
        inputs = sum(not flight.outputs for flight in self._flights.values())
        return StageMemory(
            weight_copies=storages.weight_copies,
            peak_weight_copies=self._peak_versions,
            graphs=len(self._flights) - inputs,
            inputs=inputs,
            peak_in_flight=self._peak,
            weight_bytes=storages.weight_bytes,
            in_flight_bytes=storages.other_bytes,
            correction_bytes=self.corrector.bytes,
        )


def _kept_as_they_come(inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Will hold the gradients of inputs, by place, that autograd would lay out anew for ``.grad``.

    In an unsplit model the layer before gets them as they are, and its sums go by their layout.
    """
    kept: dict[int, Tensor] = {}

    def keep(place: int, strides: tuple[int, ...], gradient: Tensor) -> None:
        if gradient.layout == torch.strided and gradient.stride() != strides:
            kept[place] = _without_holes(gradient)

    for place, tensor in enumerate(inputs):
        if tensor.requires_grad:
            tensor.register_hook(partial(keep, place, tensor.stride()))
    return kept


def precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """The context every forward runs in."""
    if autocast is None:
        return nullcontext()
    # The cache would keep the weights' casts across an update inside one context.
    return torch.autocast(device.type, dtype=autocast, cache_enabled=False)


def _without_holes(tensor: Tensor) -> Tensor:
    """The tensor in the layout in which it would arrive in another process."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def _describe(module: nn.Module) -> str:
    names = [type(child).__name__ for child in module.children()] or [type(module).__name__]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
