"""One averager for every averaging: it starts averages of weights and merges them later."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SparseAdam

from offbeat.averaging.base import Averaging
from offbeat.averaging.compression import Codec, codec_for
from offbeat.averaging.flat import dtype_of, flatten, ordered_mean, unflatten
from offbeat.averaging.fragment import Fragment
from offbeat.errors import ConfigurationError
from offbeat.records.ledger import Ledger
from offbeat.stages.stage import Stage
from offbeat.transport.base import Gathered, Key, Transport


class Task(NamedTuple):
    """What a worker does between its actions: start an average, or take one in."""

    kind: Literal["S", "M"]
    what: Literal["gradients", "weights"]
    number: int
    """The version of the weights at which the average was started."""
    fragment: int = 0
    arrives: bool = True
    """False for a merge without an average: none has been started yet."""

    def __str__(self) -> str:
        verb = "the start" if self.kind == "S" else "the merge"
        return f"{verb} of the average of {self.what} number {self.number}"


class Averager:
    """Keeps one stage of one replica together with the same stage of the others."""

    def __init__(
        self,
        averaging: Averaging,
        stage: Stage,
        replicas: int,
        transport: Transport,
        ledger: Ledger,
    ) -> None:
        self._averaging = averaging
        self._plan = averaging.plan()
        self._stage = stage
        self._replicas = replicas
        self._transport = transport
        self._ledger = ledger
        self._trainable = stage.trainable
        if self._plan is None or averaging.warmup:
            _refuse_sparse_only(averaging, stage)
        if self._plan is not None and self._plan.partners is not None and not averaging.exact:
            raise ConfigurationError(
                f"{averaging}: exact=False sends one sum over all replicas, and here a replica"
                " averages with its partners only. Use exact=True."
            )
        self._layers = _layers_of(stage, self._plan.fragments if self._plan else 1)
        self._fragments: list[Fragment] = []
        self._gradient_codec = codec_for(
            averaging.compress, dtype_of(self._trainable), [p.numel() for p in self._trainable]
        )
        self._local_from = averaging.warmup
        """The version of the weights from which local steps are counted."""

    def before_update(self) -> list[Task]:
        """What must happen between a backward and its update."""
        if not self._trainable:
            return []
        version = self._stage.version
        if self._plan is None or version < self._local_from:
            return [Task(kind, "gradients", version) for kind in ("S", "M")]
        if not self._fragments:
            self._fragments = self._new_fragments()
        return []

    def _new_fragments(self) -> list[Fragment]:
        assert self._plan is not None
        return [
            Fragment(parameters, self._stage, self._averaging, self._plan, self._replicas)
            for parameters in self._layers
        ]

    def after_update(self) -> list[Task]:
        """What follows an update, in order."""
        version = self._stage.version
        taken = version - self._local_from
        if self._plan is None or not self._fragments or taken <= 0:
            return []
        every, delay = self._plan.every, self._plan.delay
        tasks = []
        for number, fragment in enumerate(self._fragments):
            starts = taken % every == self._plan.starts_at(number)
            start = [Task("S", "weights", version, number)] if starts else []
            sent = version if starts and delay == 0 else fragment.started
            merge = []
            if sent is not None and version == sent + delay:
                merge = [Task("M", "weights", sent, number)]
            elif starts and fragment.outer.sends_first:
                merge = [Task("M", "weights", version, number, arrives=False)]
            starts_first = delay == 0 or fragment.outer.sends_first
            tasks += start + merge if starts_first else merge + start
        return tasks

    def needs(self, task: Task) -> list[Key]:
        return [self._key(task)] if task.kind == "M" and task.arrives else []

    def _key(self, task: Task) -> Key:
        return Key(task.what, self._stage.index, task.number, source=task.fragment)

    def carry_out(self, task: Task) -> None:
        if task.kind == "S":
            self._start(task)
        else:
            self._merge(task)

    def _start(self, task: Task) -> None:
        began = perf_counter()
        if task.what == "gradients":
            parts = _gradients_of(self._trainable, self._gradient_codec)
        else:
            parts = self._fragments[task.fragment].start(task.number)
        summed = not self._averaging.exact
        self._transport.gather(self._key(task), parts, summed=summed)
        self._record("S", task, began, perf_counter())

    def _merge(self, task: Task) -> None:
        began = perf_counter()
        gathered = None
        if task.arrives:
            gathered = self._transport.receive(self._key(task))
            self._record("A", task, gathered.sent_s, gathered.arrived_s)
        if task.what == "gradients":
            assert gathered is not None
            _take_gradients(self._trainable, self._gradient_codec, gathered)
        else:
            self._fragments[task.fragment].merge(task.number, gathered)
        self._record("M", task, began, perf_counter())

    def _record(self, kind: Literal["S", "A", "M"], task: Task, start: float, end: float) -> None:
        stage = self._stage
        self._ledger.record(
            kind, stage.index, task.number, stage.version, start, end, replica=stage.replica
        )

    def pending(self) -> list[Key]:
        """Averages that are under way."""
        return [
            Key("weights", self._stage.index, version, source=number)
            for number, fragment in enumerate(self._fragments)
            for version in fragment.under_way
        ]

    def settle(self) -> None:
        """All replicas have just been given the same weights: a round begins here."""
        for fragment in self._fragments:
            fragment.settle()
        if self._plan is not None:
            self._local_from = max(self._averaging.warmup, self._stage.version)

    def snapshot(self, *, debts: bool = True) -> dict[str, Any]:
        """Where its rounds stand; vectors are never written again, so they are shared.

        Without ``debts``, which are what rounding has left out of this replica's messages, it is
        what another replica can go on from.
        """
        return {
            "local_from": self._local_from,
            "gradient_codec": self._gradient_codec.memory() if debts else {},
            "fragments": [fragment.snapshot(debts=debts) for fragment in self._fragments],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._local_from = state["local_from"]
        self._gradient_codec.load(state["gradient_codec"])
        self._fragments = self._new_fragments() if state["fragments"] else []
        for fragment, found in zip(self._fragments, state["fragments"], strict=True):
            fragment.restore(found)

    def forget(self) -> None:
        """Weights were loaded from elsewhere: nothing of the past counts."""
        self._fragments = []
        self._local_from = max(self._averaging.warmup, self._stage.version)


def _refuse_sparse_only(averaging: Averaging, stage: Stage) -> None:
    """Averaged gradients are flat vectors, so all of them come back dense."""
    if any(isinstance(optimizer, SparseAdam) for optimizer in stage.optimizers):
        raise ConfigurationError(
            f"{averaging.title} averages gradients, which makes them dense, and SparseAdam of stage"
            f" {stage.index} takes sparse ones only. Use nn.Embedding(..., sparse=False) with Adam,"
            " or an averaging of weights without warmup, such as LocalSGD(every=4)."
        )


def _layers_of(stage: Stage, fragments: int) -> list[list[nn.Parameter]]:
    """The stage's trainable parameters, layer i in fragment i modulo ``fragments``."""
    trainable = stage.trainable
    for parameter in trainable:
        if parameter.is_complex():
            raise ConfigurationError(
                f"stage {stage.index} has complex weights: averages are taken of real numbers only."
                " Hold them as pairs of real ones (torch.view_as_real)."
            )
    if fragments == 1 or not trainable:
        return [trainable] if trainable else []
    layers: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    for module in (inner for outer in stage.modules for inner in outer.modules()):
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            layers.append(own)
    if len(layers) < fragments:
        raise ConfigurationError(
            f"fragments={fragments}, but stage {stage.index} has {len(layers)} layers with weights:"
            f" give at most {len(layers)}, or cut the model into fewer stages."
        )
    return [[p for layer in layers[f::fragments] for p in layer] for f in range(fragments)]


def _gradients_of(parameters: Sequence[nn.Parameter], codec: Codec) -> list[Tensor]:
    """All gradients in a vector, and for each parameter whether it has one."""
    vector = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    present = vector.new_tensor([float(p.grad is not None) for p in parameters])
    return [*codec.encode(vector), present]


def _take_gradients(parameters: Sequence[nn.Parameter], codec: Codec, gathered: Gathered) -> None:
    """The mean of all replicas' gradients; none where no replica has one."""
    mean = ordered_mean([codec.decode(parts[:-1]) for parts in gathered.parts], gathered.replicas)
    present = ordered_mean([parts[-1] for parts in gathered.parts], gathered.replicas).tolist()
    gradients = unflatten(mean, parameters)
    for parameter, gradient, some in zip(parameters, gradients, present, strict=True):
        parameter.grad = gradient if some else None
