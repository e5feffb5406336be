"""What processes run in tests: importable functions, one call per process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import offbeat
from helpers import OPTIMIZERS, Batch, cnn, image_batches, trainer_for, vector_batches
from offbeat.methods import Method


def dropout_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Dropout(0.3), nn.LayerNorm(12), nn.Linear(12, 12), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4),
    )  # fmt: skip


def job_of(model: str) -> tuple[nn.Sequential, list[Batch]]:
    if model == "cnn":
        return cnn(), image_batches(7, rows=8, last_rows=5)
    return dropout_net(), vector_batches(7, rows=8, dtype=torch.float32)


def train(
    model: str, method: Method, stages: int, optimizer: str = "momentum", **settings: Any
) -> dict[str, Any]:
    """Trains, evaluates in the middle and at the end; returns everything a user could look at."""
    network, batches = job_of(model)
    trainer = trainer_for(network, method, OPTIMIZERS[optimizer], stages=stages, seed=3, **settings)
    losses: list[float | None] = []
    middle = None
    for n, (x, y) in enumerate(trainer.batches(batches)):
        loss = trainer.step(x, y)
        losses.append(None if loss is None else float(loss))
        if n == 3:
            middle = trainer.evaluate(trainer.batches(batches))
    losses += [float(loss) for loss in trainer.flush()]
    end = trainer.evaluate(batches)
    ledger = trainer.ledger
    return {
        "state": trainer.state_dict(),
        "losses": losses,
        "evaluations": (middle, end),
        "lags": [ledger.lags(stage) for stage in range(stages)],
        "ledger_losses": ledger.losses(stages - 1),
        "memory": trainer.memory(),
        "cuts": trainer.cuts,
    }


def train_all(jobs: list[tuple[str, Method, int, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several trainers one after the other in the same processes."""
    return [
        train(model, method, stages, optimizer, **settings)
        for model, method, stages, optimizer, settings in jobs
    ]


def ping(value: int) -> int:
    return value * value


def raise_on(rank: int) -> None:
    import os

    if int(os.environ["RANK"]) == rank:
        raise ValueError("a planned mistake")
    x, y = vector_batches(1, dtype=torch.float32)[0]
    trainer = trainer_for(dropout_net(), offbeat.StaleWeights(), stages=2)
    for _ in range(10):
        trainer.step(x, y)


def disagree(what: str) -> None:
    """Sets rank 1 up differently in one respect."""
    import os

    other = os.environ["RANK"] == "1"
    network, batches = job_of("cnn")
    method: Method = offbeat.StaleWeights()
    stages = 2
    if what == "method" and other:
        method = offbeat.PipeDream()
    if what == "model" and other:
        network = network.append(nn.Identity()).append(nn.Linear(5, 5))
    if what == "weights" and other:
        network = cnn(seed=5)
    if what == "threads" and other:
        torch.set_num_threads(2)
    if what == "stages":
        stages = 3
    trainer = trainer_for(network, method, stages=stages)
    for x, y in trainer.batches(batches[: 2 if what == "loader" and other else 3]):
        trainer.step(x, y)


def shuffle_differently() -> None:
    import os

    network, batches = job_of("cnn")
    if os.environ["RANK"] == "1":
        batches = batches[::-1]
    trainer = trainer_for(network, offbeat.StaleWeights(), stages=2)
    for x, y in batches:
        trainer.step(x, y)


def train_serially() -> dict[str, Any]:
    return train("cnn", offbeat.StaleWeights(), 3, engine="serial")


def run_with(faults: offbeat.Faults, timeout: float = 30.0) -> None:
    network, batches = job_of("cnn")
    trainer = trainer_for(network, offbeat.StaleWeights(), stages=3, faults=faults, timeout=timeout)
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
