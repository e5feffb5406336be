"""One averager for every averaging: it starts averages of weights and merges them later."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SparseAdam

from offbeat import nest
from offbeat.averaging.base import Averaging
from offbeat.averaging.compression import Codec, codec_for
from offbeat.averaging.division import divide
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
        stages: int = 1,
    ) -> None:
        """``stages``: how many the model has."""
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
        self._parts = divide(stage, self._plan.fragments if self._plan else 1, stages)
        self._fragments: dict[int, Fragment] = {}
        """By number; a fragment may have nothing in this stage."""
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

    def _new_fragments(self) -> dict[int, Fragment]:
        assert self._plan is not None
        return {
            number: Fragment(parameters, self._stage, self._averaging, self._plan, self._replicas)
            for number, parameters in enumerate(self._parts)
            if parameters
        }

    def after_update(self) -> list[Task]:
        """What follows an update, in order."""
        version = self._stage.version
        taken = version - self._local_from
        if self._plan is None or not self._fragments or taken <= 0:
            return []
        every, delay = self._plan.every, self._plan.delay
        tasks = []
        for number, fragment in self._fragments.items():
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
        members = None
        if task.what == "gradients":
            parts = _gradients_of(self._trainable, self._gradient_codec)
        else:
            members = self._fragments[task.fragment].members()
            parts = self._fragments[task.fragment].start(task.number)
        summed = not self._averaging.exact
        self._transport.gather(self._key(task), parts, summed=summed, members=members)
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
            for number, fragment in self._fragments.items()
            for version in fragment.under_way
        ]

    @property
    def bytes(self) -> int:
        """What it keeps from one update to the next."""
        kept = nest.tensors(self.snapshot())
        return sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()
        )

    @property
    def sent_bytes(self) -> int:
        """What this replica sends to another in a round, as far as it has sent anything."""
        return sum(fragment.sent_bytes for fragment in self._fragments.values())

    def global_copy(self) -> dict[int, Tensor]:
        """The point that rounds begin from, by the id of each weight; of some rules there is none.

        Before the first local step it is the weights themselves.
        """
        found: dict[int, Tensor] = {}
        made = self._fragments or ({} if self._plan is None else self._new_fragments())
        if (self._trainable and any(f.outer.copy is None for f in made.values())) or not made:
            raise ConfigurationError(
                f"of='global': {self._averaging.title} keeps no copy of the weights beside the"
                " replicas' own. Take of='average', or a replica's by its number."
            )
        for fragment in made.values():
            assert fragment.outer.copy is not None
            pieces = unflatten(fragment.outer.copy, fragment.parameters)
            found |= {id(p): piece for p, piece in zip(fragment.parameters, pieces, strict=True)}
        return found

    def settle(self) -> None:
        """All replicas have just been given the same weights: a round begins here."""
        for fragment in self._fragments.values():
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
            "fragments": [own.snapshot(debts=debts) for own in self._fragments.values()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._local_from = state["local_from"]
        self._gradient_codec.load(state["gradient_codec"])
        self._fragments = self._new_fragments() if state["fragments"] else {}
        for fragment, found in zip(self._fragments.values(), state["fragments"], strict=True):
            fragment.restore(found)

    def forget(self) -> None:
        """Weights were loaded from elsewhere: nothing of the past counts."""
        self._fragments = {}
        self._local_from = max(self._averaging.warmup, self._stage.version)


def _refuse_sparse_only(averaging: Averaging, stage: Stage) -> None:
    """Averaged gradients are flat vectors, so all of them come back dense."""
    if any(isinstance(optimizer, SparseAdam) for optimizer in stage.optimizers):
        raise ConfigurationError(
            f"{averaging.title} averages gradients, which makes them dense, and SparseAdam of stage"
            f" {stage.index} takes sparse ones only. Use nn.Embedding(..., sparse=False) with Adam,"
            " or an averaging of weights without warmup, such as LocalSGD(every=4)."
        )


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
