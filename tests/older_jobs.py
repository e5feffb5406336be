"""Runs whose files an older version wrote: samples under ``tests/older``, and how they go on.

The samples were written by version 0.1.0 as of commit b4ead2a. To write them again, from a tree of
that commit (only what every version has is used here):

    PYTHONPATH=<that tree>/src python tests/older_jobs.py tests/older
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat

SAVED_AT, STEPS = 5, 12
TRAIN = ["train", "--method", "stale-weights", "--stages", "2", "--model", "mlp:hidden=[4]",
         "--batch-size", "128", "--epochs", "1", "--lr", "0.02"]  # fmt: skip


def trainer() -> offbeat.Trainer:
    """Two stages, lag, momentum and a schedule of the learning rate."""
    torch.manual_seed(0)
    return offbeat.Trainer(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        method=offbeat.StaleWeights(),
        stages=2,
        seed=1,
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    """Not random: the same numbers in every version of PyTorch."""
    x = torch.linspace(-2, 2, STEPS * 20, dtype=torch.float64).mul(7).sin().view(STEPS, 5, 4)
    return [(part, (part.sum(1) > 0).long()) for part in x]


def go_on(trainer: offbeat.Trainer) -> dict[str, Any]:
    """Trains from where it is to the end; everything that the next version must find too."""
    losses = [trainer.step(x, y) for x, y in batches()[SAVED_AT:]]
    losses += trainer.flush()
    state = trainer.state_dict()
    return {
        "weights": {name: value.tolist() for name, value in state.items()},
        "losses": [None if loss is None else float(loss) for loss in losses],
    }


def write(folder: Path) -> None:
    cli = importlib.import_module("offbeat.cli")  # where the version that writes them has it
    expected: dict[str, Any] = {}
    for kind in ("drained", "exact"):
        first, second = trainer(), trainer()
        for x, y in batches()[:SAVED_AT]:
            first.step(x, y)
        first.save(folder / kind, drain=kind == "drained", wait=True)
        second.resume(folder / kind)
        expected[kind] = go_on(second)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    with contextlib.suppress(SystemExit):
        cli.main([*TRAIN, "--out", str(folder / "run")])


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]))
