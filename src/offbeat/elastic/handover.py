"""What the others give a replica that comes back, and how it takes their average.

They drain their pipes and take the average of their weights, as ``flush`` does; so what a replica
needs is that of a run between two fills. All begin the next fill together.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offbeat import nest
from offbeat.averaging.replicas import mean_of
from offbeat.checkpoints import tensorfile
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.worker import Worker
from offbeat.errors import CheckpointError, ConfigurationError, StoppedError
from offbeat.nest import Nest
from offbeat.stages.snapshot import on_device

State = dict[str, Any]


def let_in(pipeline: Pipeline) -> None:
    """Before a step: drains the pipe and gives all that is needed to whoever has come back."""
    membership = pipeline.engine.membership
    if membership is None or (found := membership.admission(pipeline.position.step)) is None:
        return
    admission, pair = found
    pipeline.drain()
    try:
        gift = tensorfile.to_bytes(_state_of(pipeline))
    except CheckpointError as error:  # no reason for the others to end
        gift = tensorfile.to_bytes({"refusal": str(error)})
    membership.admit(admission, pair, torch.frombuffer(bytearray(gift), dtype=torch.uint8))
    pipeline.engine.welcome(admission)


def _state_of(pipeline: Pipeline) -> State:
    return {
        "position": pipeline.position.state() | {"owed": []},
        "asked": pipeline.replicas.asked,
        "questions": pipeline.engine.questions,
        "first": pipeline.first,
        "counts": list(pipeline.engine.placement.counts),
        "workers": list(map(_worker_state, pipeline.engine.workers)),
    }


def _worker_state(worker: Worker) -> State:
    assert worker.averager is not None
    return {
        "began_at": worker.began_at,
        "stage": worker.stage.snapshot(),
        "averager": worker.averager.snapshot(debts=False),  # which are this replica's own
    }


def join(pipeline: Pipeline) -> None:
    """Waits to be let in, and becomes what the others are on average."""
    device, engine = pipeline.setup.device, pipeline.engine
    assert engine.membership is not None
    with pipeline.stopping_on_error(), torch.enable_grad():
        admission, gifts = engine.membership.join()
        engine.welcome(admission)
        given = [on_device(tensorfile.from_bytes(g.numpy().tobytes()), device) for g in gifts]
        state = given[0]
        if "refusal" in state:
            raise ConfigurationError(
                f"this replica cannot take over the others' state: {state['refusal']}"
            )
        if engine.needs_costs:
            engine.place(state["counts"], agreed=True)
        if not pipeline.is_built:
            pipeline.build(state["first"])
        pipeline.models.make_room()
        pipeline.position.load(state["position"])
        pipeline.replicas.asked = state["asked"]
        engine.questions = state["questions"]
        everyone = zip(*(other["workers"] for other in given), strict=True)
        for worker, of_worker in zip(engine.workers, everyone, strict=True):
            _take_over(pipeline, worker, of_worker)
        pipeline.models.hide()


def _take_over(pipeline: Pipeline, worker: Worker, given: Sequence[State]) -> None:
    assert worker.averager is not None
    own = given[0]
    pipeline.follow(worker, *own["began_at"])
    # Weights are the same in all; moments and running statistics are each replica's own.
    means = {
        name: _mean([other["stage"][name] for other in given]) for name in ("buffers", "optimizers")
    }
    worker.stage.restore(own["stage"] | means)
    worker.averager.restore(own["averager"])


def _mean(nests: Sequence[Nest]) -> Nest:
    means = iter([mean_of(same) for same in zip(*map(nest.tensors, nests), strict=True)])
    return nest.replace(nests[0], lambda _: next(means))


class CatchingUp:
    """A script that begins anew passes over what the others have done already."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._passed = 0
        self.behind = pipeline.engine.returning
        """Until the first batch is handed out, not only until the others let this replica in."""

    def rest_of(self, batches: Iterator[tuple[Nest, Nest]]) -> Iterator[tuple[Nest, Nest]]:
        if self._pipeline.engine.returning:
            join(self._pipeline)
        for batch in batches:
            if self.behind and self._passed < self._pipeline.position.step:
                self._passed += 1
                continue
            self.behind = False
            yield batch

    def refuse_if_behind(self) -> None:
        if self.behind:
            raise StoppedError(
                "this process takes the place of one that died and has not caught up with the"
                " others yet: loop over trainer.batches(loader), which passes over the batches"
                " they have had, and do nothing else while trainer.behind is true."
            )
