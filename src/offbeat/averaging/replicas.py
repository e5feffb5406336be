"""What the replicas of a model are together: their mean, for export, evaluation and a flush."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offbeat.averaging import flat
from offbeat.averaging.base import Averaging
from offbeat.engines.worker import Worker
from offbeat.transport.base import Key


class Replicas:
    """Means over all replicas of the stages of this process; all processes must ask alike."""

    def __init__(self, count: int, averaging: Averaging | None) -> None:
        self.count = count
        self.averaging = averaging
        self.asked = 0
        """How many means have been asked for; all replicas count alike."""

    def settle(self, workers: Sequence[Worker]) -> None:
        """Sets every replica to the mean of all, in place of any average still under way."""
        if self.averaging is None:
            return
        everyone = self._gather(workers, [worker.stage.parameters for worker in workers])
        for worker, replicas in zip(workers, everyone, strict=True):
            assert worker.averager is not None
            for key in worker.averager.pending():
                worker.transport.receive(key)
            with torch.no_grad():
                for parameter, values in zip(worker.stage.parameters, replicas, strict=True):
                    parameter.copy_(mean_of(values))
            worker.averager.settle()

    def states(
        self, workers: Sequence[Worker], *, first: bool = False
    ) -> dict[int, dict[str, Tensor]]:
        """Weights and buffers per stage: the mean of all replicas, or those of the first."""
        if self.count == 1:
            return {worker.stage.index: state_of(worker.stage.module) for worker in workers}
        assert self.averaging is not None
        local = self.averaging.statistics == "local"
        states = {}
        own = [state_of(worker.stage.module) for worker in workers]
        everyone = self._gather(workers, [list(state.values()) for state in own])
        for worker, state, replicas in zip(workers, own, everyone, strict=True):
            states[worker.stage.index] = {
                name: values[0]
                if first or (local and not isinstance(entry, nn.Parameter))
                else mean_of(values)
                for (name, entry), values in zip(state.items(), replicas, strict=True)
            }
        return states

    def _gather(
        self, workers: Sequence[Worker], tensors: Sequence[Sequence[Tensor]]
    ) -> list[list[tuple[Tensor, ...]]]:
        """Per worker and tensor the values in all replicas."""
        self.asked += 1
        keys = [Key("export", worker.stage.index, self.asked) for worker in workers]
        for worker, key, own in zip(workers, keys, tensors, strict=True):
            worker.transport.gather(key, [tensor.detach().clone() for tensor in own])
        gathered = [
            worker.transport.receive(key) for worker, key in zip(workers, keys, strict=True)
        ]
        return [list(zip(*replicas.parts, strict=True)) for replicas in gathered]


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's weights and buffers themselves, by name; what has two names by the first."""
    seen: set[int] = set()
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            state[name] = value
    return state


def mean_of(values: Sequence[Tensor]) -> Tensor:
    """The mean in the order given; exactly the value where all agree, the first's counters."""
    first = values[0]
    if not first.is_floating_point() or all(torch.equal(first, value) for value in values[1:]):
        return first
    wide = flat.dtype_of(values)
    return flat.mean_of([value.to(wide) for value in values], len(values)).to(first.dtype)
