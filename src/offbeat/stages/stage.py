"""A stage: a slice of the model with its optimizer, weight versions and batches in flight."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat import nest
from offbeat.corrections.base import Correction
from offbeat.errors import StageError
from offbeat.methods.base import Rule
from offbeat.monitors.monitor import Monitor
from offbeat.nest import Bundle, Nest
from offbeat.stages import snapshot
from offbeat.stages.attributes import Change
from offbeat.stages.corrector import Corrector
from offbeat.stages.fill import Fill
from offbeat.stages.flight import Flight, Flights
from offbeat.stages.lanes import Lanes
from offbeat.stages.memory import StageMemory, Storages
from offbeat.stages.network import Network
from offbeat.stages.norms import Norms, norms_of, total_of
from offbeat.stages.recorded import Recorded
from offbeat.stages.runner import Direct
from offbeat.stages.state import StageState
from offbeat.stages.versions import give_each_its_own, move_to_fresh_storage, overlapping


class Stage:
    """``forward``, ``backward`` and ``update`` of one slice of the model.

    The caller decides the order; the stage knows which weights each backward sees. It keeps the
    books: versions, micro-batches in flight, optimizers, corrections. Its runner does the work, at
    once or, with ``lanes``, by recording it once and replaying it.
    """

    def __init__(self, network: Network, lanes: Lanes | None = None) -> None:
        self.network = network
        self.index, self.replica, self.device = network.index, network.replica, network.device
        self.module, self.head, self.modules = network.module, network.head, network.modules
        self.parameters, self.trainable = network.parameters, network.trainable
        self.habits = network.habits
        self.norm_order: list[int] | None = None
        """Where the norms of all stages' gradients come in the order of the unsplit model's
        parameters; None if that is theirs already."""
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.version = 0
        self.old_versions: dict[int, list[Tensor]] = {}
        """The trainable weights of versions that a forward may still ask for."""
        self.flights = Flights()
        self.correct((), 1, None)
        self.fill = Fill()
        self.clip_to: float | None = None
        """What the next update clips the stage's own gradients to."""
        self.norm: Tensor | None = None
        """What the gradients of the last update were clipped by, before they were."""
        self.peak_versions = 1
        self.runner: Direct | Recorded = Direct(self) if lanes is None else Recorded(self, lanes)

    def correct(
        self, corrections: Sequence[Correction], stages: int, monitor: Monitor | None
    ) -> None:
        """Lets corrections and a monitor act from the next fill on."""
        self.corrector = Corrector(
            corrections, monitor, self.flights, self.index, stages, self.trainable
        )

    def begin(self, fill: Fill) -> None:
        """Starts a fill; only between a drain and the next forward."""
        self.fill = fill
        self.flights.clear()
        self.corrector.begin(fill, self.optimizers)
        lends_other_weights = self.corrector.predicts or self.corrector.rewinds
        moves = fill.kept_versions or fill.rule == "stash" or self.network.shared
        if not fill.plain and (moves or lends_other_weights):
            self._refuse_overlapping()  # weights will move
            give_each_its_own(self.parameters)
        self.network.begin(fill, fill.shrink * self.corrector.shrinkage)
        self.old_versions.clear()
        self.runner.begin(fill)

    def _refuse_overlapping(self) -> None:
        named = ((self.network.names[id(p)], p) for p in dict.fromkeys(self.parameters))
        for one, other in overlapping(named):
            raise StageError(
                f"stage {self.index}: {one!r} and {other!r} are two parameters in the same memory,"
                " and this stage lags and keeps versions of each by itself, so that an update of"
                " one would no longer reach the other. Tie them by assigning one nn.Parameter to"
                " both modules, or give each its own: nn.Parameter(view.clone())."
            )

    def look_again(self, changes: Sequence[Change]) -> None:
        """Forgets what it has learnt of modules that a script has changed."""
        for work in self.flights.works():
            if work.outputs and work.outdated is None:
                work.outdated = str(changes[0])
        self.network.look_again(changes)
        self.runner.look_again()

    @property
    def rule(self) -> Rule | None:
        """Which weights a backward sees; None where they are the same anyway."""
        return self.network.rule

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
        if read != self.version and read not in self.old_versions:
            raise StageError(
                f"stage {self.index}: batch {batch} asks for version {read} of the weights; there"
                f" are {sorted(self.old_versions)} and the newest, {self.version}."
            )
        flight = Flight(batch=batch, version=read)
        result = self.runner.forward(flight, given, target, scale)
        self.flights.take_off(flight)
        return result

    def prepare(self, batch: int) -> None:
        """Builds the graph of a micro-batch anew at the newest weights, where the rule says so.

        It needs no gradient from the next stage, so it can be done while that is on its way.
        """
        if self.network.rule == "recompute":
            self.runner.prepare(self.flights.in_air[batch])

    def backward(self, batch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds a micro-batch's gradient to the weights'; returns the gradients of its inputs."""
        self.prepare(batch)
        return self.runner.backward(self.flights.in_air[batch], gradients)

    def update(self) -> None:
        """Applies the gathered gradients: one optimizer step, one more version."""
        self.runner.update()
        if self.network.shared:
            self.network.forget_sent()
        self.clip_to = None
        for parameter in self.trainable:
            parameter.grad = None
        for scheduler in self.schedulers:
            scheduler.step()
        self.version += 1
        if self.corrector.active:
            self.corrector.observe()
        self.flights.landed.clear()
        self._count_versions()

    def step(self) -> None:
        """The part of an update that a runner may record: clipping, and the optimizers' steps."""
        if self.clip_to is not None:
            self._scale(self.clip_to, [self.gradient_norms()])
        corrected = self.corrector.update(self.version) if self.corrector.active else nullcontext()
        with corrected:
            for optimizer in self.optimizers:
                optimizer.step()

    # ---------------------------------------------------------------- between backward and update

    def drop_gradients(self) -> None:
        """Lets the next update apply nothing."""
        for parameter in self.parameters:
            parameter.grad = None
        self.runner.drop_gradients()

    def gradient_norms(self) -> Norms:
        """The norm of every gradient, in the order of the parameters."""
        self.runner.show_gradients()
        return norms_of(self.trainable, self.network.of_model, self.device)

    def clip(self, max_norm: float, own: Norms | None = None, others: Sequence[Norms] = ()) -> None:
        """Scales the gradients so that their norms together come to at most ``max_norm``.

        ``own`` are the stage's norms where they are known already; with ``others``, those of all
        other stages in order, it gives the bits of ``torch.nn.utils.clip_grad_norm_`` on the whole
        model.
        """
        if own is None:
            self.clip_to = max_norm
            return
        self.runner.show_gradients()
        self._scale(max_norm, [*others[: self.index], own, *others[self.index :]])

    def _scale(self, max_norm: float, norms: Sequence[Norms]) -> None:
        total = total_of(norms, self.norm_order if self.fill.synchronous else None)
        self.norm = total
        if total is not None:  # there is none in a stage without parameters
            torch.nn.utils.clip_grads_with_norm_(self.trainable, max_norm, total)

    # ---------------------------------------------------------------- versions and memory

    def save_version_in_use(self) -> None:
        """Lets the update write beside the values that something in flight still needs."""
        kept = self.fill.kept_versions
        if kept:
            self.old_versions[self.version] = move_to_fresh_storage(self.trainable)
            for version in [v for v in self.old_versions if v <= self.version - kept]:
                del self.old_versions[version]
        elif self.rule == "stash" or self.network.shared:
            needed: set[nn.Parameter] = set()
            for flight in self.flights.in_air.values():
                if flight.work is not None and not flight.lent and flight.version == self.version:
                    needed.update(self.network.shared)  # later stages have not done with it
                    if self.rule == "stash":
                        needed |= flight.work.graph.weights
            move_to_fresh_storage([p for p in self.trainable if p in needed])

    def _count_versions(self) -> None:
        kept = self.rule == "stash" or self.fill.kept_versions
        # No more versions are alive than there are flights: so there is seldom need to look.
        flights = self.flights.in_air.values()
        if not kept or self.peak_versions > len(flights) + len(self.old_versions):
            return
        alive = {self.version, *self.old_versions}
        alive |= {f.version for f in flights if f.work is not None and f.work.graph.weights}
        self.peak_versions = max(self.peak_versions, len(alive))

    def discard(self) -> None:
        """Forgets everything in flight, and gradients that were not applied."""
        self.runner.discard()
        self.network.forget_sent()
        self.flights.clear()
        self.old_versions.clear()
        self.corrector.forget()
        self.clip_to = None
        for parameter in self.parameters:
            parameter.grad = None

    def snapshot(self) -> StageState:
        """All that later steps depend on, in plain values and tensors that no step overwrites."""
        self.runner.before_snapshot()
        return snapshot.take(self)

    def restore(self, state: StageState) -> None:
        """Puts back what :meth:`snapshot` took; the fill must have begun already."""
        with self.runner.restoring():
            snapshot.put_back(self, state)

    def memory(self) -> StageMemory:
        storages = Storages(self.parameters)
        for lent in (*self.old_versions.values(), *self.corrector.predicted_in_flight()):
            for parameter, values in zip(self.trainable, lent, strict=True):
                storages.add_version(parameter, values)
        works = self.flights.works()
        for work in works:
            storages.add_graph(work.graph)
            storages.add_tensors(nest.tensors(work.given))
            if isinstance(work.leaves, Bundle):  # weights of earlier stages, that come with a batch
                storages.add_tensors(work.leaves.ties.values())
            for parameter, values in work.copies.items():
                storages.add_version(parameter, values)
        peak = self.peak_versions
        if self.runner.reuses_memory:  # a copy per micro-batch, not per version
            peak = max(peak, storages.weight_copies)
        inputs = sum(not work.outputs for work in works)
        return StageMemory(
            weight_copies=storages.weight_copies,
            peak_weight_copies=peak,
            graphs=len(works) - inputs,
            inputs=inputs,
            peak_in_flight=self.flights.peak,
            weight_bytes=storages.weight_bytes,
            in_flight_bytes=storages.other_bytes,
            correction_bytes=self.corrector.bytes,
            parameters=sum(parameter.numel() for parameter in self.parameters),
            layers=self._count_layers(),
        )

    def _count_layers(self) -> int:
        own = {id(parameter) for parameter in self.parameters}
        lists = (module.parameters(recurse=False) for module in self.module.modules())
        return sum(any(id(parameter) in own for parameter in each) for each in lists)
