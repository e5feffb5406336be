"""What tests of checkpoints among replicas that die and return run: one call per process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import offbeat
from helpers import OPTIMIZERS, trainer_for, vector_batches
from jobs import dropout_net
from offbeat.averaging import DaSGD
from offbeat.elastic.restarts import return_number
from offbeat.engines.processes import Processes

DIES, SAVED, LAST = 3, 8, 14


def build(replicas: int, **more: Any) -> offbeat.Trainer:
    """Averages are under way when it saves."""
    settings = {"averaging": DaSGD(every=2, delay=1), "seed": 3, "timeout": 60.0} | more
    return trainer_for(
        dropout_net(), offbeat.StaleWeights(), OPTIMIZERS["momentum"], stages=2, replicas=replicas,
        **settings,
    )  # fmt: skip


def wait_for_return(trainer: offbeat.Trainer) -> None:
    """From the promise on, steps are what it takes."""
    engine = trainer._engine
    assert isinstance(engine, Processes)
    assert engine.membership is not None
    door = engine.membership.door
    assert door is not None
    while not engine.joined_at and door._promised is None and door._admission is None:
        time.sleep(0.02)


def store(folder: Path, replicas: int, dies: int, returns: bool) -> dict[str, Any]:
    """Replica ``dies`` is killed early, and perhaps comes back; then the run is saved and goes on.

    ``drained`` is what the weights are where it is saved drained, at its end.
    """
    trainer = build(replicas, when_replica_dies="go on")
    batches = vector_batches(LAST, rows=12, dtype=torch.float32)
    mortal = trainer.rank == dies * len(trainer._engine.placement.row)
    for x, y in trainer.batches(batches):
        step = trainer._pipeline.position.step
        if step == 1 and not return_number():
            trainer.save(folder / "exact", wait=True)
        if mortal and not return_number() and step == DIES:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step(x, y)
        if returns and step >= DIES:
            wait_for_return(trainer)
        if step + 1 == SAVED:
            trainer.save(folder / "exact", data={"at": step})
    joined = trainer._engine.joined_at
    trainer.flush()
    trainer.save(folder / "drained", drain=True, wait=True)
    return {"state": trainer.state_dict(), "joined": joined}


def go_on(folder: Path, replicas: int) -> dict[str, Any]:
    """From the exact checkpoint to the same end."""
    trainer = build(replicas, when_replica_dies="go on")
    start = trainer.resume(folder)
    for x, y in trainer.batches(vector_batches(LAST, rows=12, dtype=torch.float32)[start.step :]):
        trainer.step(x, y)
    trainer.flush()
    return {"state": trainer.state_dict(), "step": start.step, "data": start.data}


def go_on_until_all_are_back(folder: Path, replicas: int) -> dict[str, Any]:
    """From an exact checkpoint that one replica is not in, until that has joined."""
    trainer = build(replicas, when_replica_dies="go on")
    batches = vector_batches(LAST, rows=12, dtype=torch.float32)
    first = 0 if trainer.behind else trainer.resume(folder).step
    for x, y in trainer.batches(batches[first:]):
        trainer.step(x, y)
        wait_for_return(trainer)
    trainer.flush()
    return {"state": trainer.state_dict(), "joined": trainer._engine.joined_at}


def go_on_alone(folder: Path, replicas: int) -> dict[str, Tensor]:
    """The same in one process."""
    trainer = build(replicas)
    start = trainer.resume(folder)
    for x, y in vector_batches(LAST, rows=12, dtype=torch.float32)[start.step :]:
        trainer.step(x, y)
    trainer.flush()
    return trainer.state_dict()
