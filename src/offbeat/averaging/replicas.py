"""What the replicas of a model are together: their mean, for export, evaluation and a flush."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from offbeat.averaging import flat
from offbeat.averaging.base import Averaging
from offbeat.engines.base import Engine
from offbeat.errors import ConfigurationError, unknown
from offbeat.transport.base import Key

if TYPE_CHECKING:
    from offbeat.engines.worker import Worker

Whose = Literal["average", "replica", "global"] | int
"""The mean of all replicas; the first replica that there is; the global copy that the rounds of
DiLoCo and its like begin from (the mean of these where each replica has one of its own); or a
replica by its number."""


class Replicas:
    """Means over all replicas of the stages of this process; all processes must ask alike."""

    def __init__(self, engine: Engine, averaging: Averaging | None) -> None:
        self._engine = engine
        self._averaging = averaging
        self.asked = 0
        """How many means have been asked for; all replicas count alike."""

    def settle(self) -> None:
        """Sets every replica to the mean of all, in place of any average still under way."""
        if self._averaging is None:
            return
        everyone = self._gather([worker.stage.parameters for worker in self._engine.workers])
        for worker, replicas in zip(self._engine.workers, everyone, strict=True):
            assert worker.averager is not None
            for key in worker.averager.pending():
                worker.transport.receive(key)
            with torch.no_grad():
                for parameter, values in zip(worker.stage.parameters, replicas, strict=True):
                    parameter.copy_(mean_of(values))
            worker.averager.settle()

    def states(self, of: Whose = "average") -> dict[int, dict[str, Tensor]]:
        """Weights and buffers per stage, of what :data:`Whose` says."""
        workers = self._engine.workers
        own = [state_of(worker.stage.module) for worker in workers]
        everyone = self._gather([self._shown(w, s, of) for w, s in zip(workers, own, strict=True)])
        return {
            worker.stage.index: {
                name: self._choose(values, entry, of)
                for (name, entry), values in zip(state.items(), replicas, strict=True)
            }
            for worker, state, replicas in zip(workers, own, everyone, strict=True)
        }

    def _shown(self, worker: "Worker", state: dict[str, Tensor], of: Whose) -> list[Tensor]:
        if of != "global":
            return list(state.values())
        copies = {} if worker.averager is None else worker.averager.global_copy()
        return [copies.get(id(entry), entry) for entry in state.values()]

    def _choose(self, values: Sequence[Tensor], entry: Tensor, of: Whose) -> Tensor:
        if isinstance(of, int):
            return values[of]
        local = self._averaging is not None and self._averaging.statistics == "local"
        if of == "replica" or (local and not isinstance(entry, nn.Parameter)):
            return values[0]
        return mean_of(values)

    def check(self, of: Whose) -> None:
        """Refuses what nobody here can show."""
        replicas = self._engine.placement.replicas
        if isinstance(of, int) and not isinstance(of, bool):
            if not 0 <= of < replicas:
                raise ConfigurationError(
                    f"of={of}: there are {replicas} replicas, so give a number from 0 to"
                    f" {replicas - 1}."
                )
            if self._engine.membership is not None:
                raise ConfigurationError(
                    f"of={of}: with when_replica_dies='go on' a replica may be gone when it is"
                    " asked for. Take of='replica', the first that is left."
                )
        elif of not in ("average", "replica", "global"):
            raise unknown("of", of, ("average", "replica", "global", "the number of a replica"))

    def _gather(self, tensors: Sequence[Sequence[Tensor]]) -> list[list[tuple[Tensor, ...]]]:
        """Per worker and tensor the values in all replicas."""
        if self._engine.placement.replicas == 1:
            return [[(tensor,) for tensor in own] for own in tensors]
        self.asked += 1
        keyed = [
            (worker.transport, Key("export", worker.stage.index, self.asked))
            for worker in self._engine.workers
        ]
        for (transport, key), own in zip(keyed, tensors, strict=True):
            transport.gather(key, [tensor.detach().clone() for tensor in own])
        gathered = [transport.receive(key) for transport, key in keyed]
        return [list(zip(*replicas.parts, strict=True)) for replicas in gathered]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's weights and buffers themselves, by name; what has two names by the first."""
    own = set(map(id, [*module.parameters(), *module.buffers()]))  # an earlier stage may own others
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in own:
            own.discard(id(value))
            state[name] = value
    return state


def mean_of(values: Sequence[Tensor]) -> Tensor:
    """The mean in the order given; exactly the value where all agree, the first's counters."""
    first = values[0]
    if not first.is_floating_point() or all(torch.equal(first, value) for value in values[1:]):
        return first
    wide = flat.dtype_of(values)
    return flat.ordered_mean([value.to(wide) for value in values], len(values)).to(first.dtype)
