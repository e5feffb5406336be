"""A replica that died comes back: what the others give it, and how it takes their average.

They drain their pipes and take the average of their weights, as ``flush`` does; so what a replica
needs is that of a run between two fills. All begin the next fill together.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from offbeat import nest
from offbeat.averaging.replicas import mean_of
from offbeat.checkpoints import tensorfile
from offbeat.errors import CheckpointError, ConfigurationError, StoppedError
from offbeat.nest import Nest
from offbeat.stages.snapshot import on_device

if TYPE_CHECKING:
    from offbeat.trainer import Trainer

State = dict[str, Any]


def let_in(trainer: "Trainer") -> None:
    """Before a step: drains the pipe and gives all that is needed to whoever has come back."""
    processes = trainer._processes
    found = None if processes is None else processes.admission(trainer._step)
    if processes is None or found is None:
        return
    trainer._owed = trainer.flush()  # handed out by the user's own flush
    try:
        gift = tensorfile.to_bytes(_state_of(trainer))
    except CheckpointError as error:  # no reason for the others to end
        gift = tensorfile.to_bytes({"refusal": str(error)})
    processes.admit(*found, torch.frombuffer(bytearray(gift), dtype=torch.uint8))


def _state_of(trainer: "Trainer") -> State:
    (worker,) = trainer._workers
    assert worker.averager is not None
    return {
        "place": trainer._place() | {"owed": []},
        "asked": trainer._replicas.asked,
        "evaluations": trainer._evaluations,
        "first": trainer._first,
        "began_at": worker.began_at,
        "stage": worker.stage.snapshot(),
        "averager": worker.averager.snapshot(debts=False),  # which are this replica's own
    }


def join(trainer: "Trainer") -> None:
    """Waits to be let in, and becomes what the others are on average."""
    assert trainer._processes is not None
    with trainer._stopping_on_error(), torch.enable_grad():
        gifts = [gift.numpy().tobytes() for gift in trainer._processes.join()]
        given = [on_device(tensorfile.from_bytes(gift), trainer._device) for gift in gifts]
        state = given[0]
        if "refusal" in state:
            raise ConfigurationError(
                f"this replica cannot take over the others' state: {state['refusal']}"
            )
        if not trainer._workers:
            trainer._build(state["first"])
        trainer._go_to(state["place"])
        trainer._replicas.asked = state["asked"]
        trainer._evaluations = state["evaluations"]
        (worker,) = trainer._workers
        assert worker.averager is not None
        trainer._follow(worker, *state["began_at"])
        # Weights are the same in all; moments and running statistics are each replica's own.
        means = {
            name: _mean([other["stage"][name] for other in given])
            for name in ("buffers", "optimizers")
        }
        worker.stage.restore(state["stage"] | means)
        worker.averager.restore(state["averager"])


def _mean(nests: Sequence[Nest]) -> Nest:
    means = iter([mean_of(same) for same in zip(*map(nest.tensors, nests), strict=True)])
    return nest.replace(nests[0], lambda _: next(means))


class CatchingUp:
    """A script that begins anew passes over what the others have done already."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._passed = 0
        self._joins = trainer._processes is not None and trainer._processes.returning

    @property
    def behind(self) -> bool:
        """Until the first batch is handed out, not only until the others let this replica in."""
        return self._joins

    def rest_of(self, batches: Iterator[tuple[Nest, Nest]]) -> Iterator[tuple[Nest, Nest]]:
        processes = self._trainer._processes
        if processes is not None and processes.returning:
            join(self._trainer)
        for batch in batches:
            if self._joins and self._passed < self._trainer._step:
                self._passed += 1
                continue
            self._joins = False
            yield batch

    def refuse_if_behind(self) -> None:
        if self._joins:
            raise StoppedError(
                "this process takes the place of one that died and has not caught up with the"
                " others yet: loop over trainer.batches(loader), which passes over the batches"
                " they have had, and do nothing else while trainer.behind is true."
            )
