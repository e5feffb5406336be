"""Runs over a model that was built on meta; importable, one call per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from helpers import OPTIMIZERS, Batch
from jobs import Tower, tower_batches
from offbeat.checkpoints import load_weights

METHODS: dict[str, offbeat.methods.base.Method] = {
    "synchronous": offbeat.Synchronous(),
    "pipedream": offbeat.PipeDream(),
    "stale-weights": offbeat.StaleWeights(),
}


class Block(nn.Module):
    """With a table that no file has, as rotary embeddings are."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.linspace(0.5, 1, width), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * self.table


class Tied(nn.Module):
    """Its first and last weight are one."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def model_of(kind: str, *, meta: bool) -> Any:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        if kind == "tower":
            return Tower()
        if kind == "list":
            return [nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 4)]
        model = Tied()
    if meta:
        for block in model.blocks:
            block.table = Block(8).table
    return model


def batches_of(kind: str) -> list[Batch]:
    if kind != "tied":
        return tower_batches()
    torch.manual_seed(1)
    return [(torch.randint(11, (4,)), torch.randint(11, (4,))) for _ in range(7)]


def trainer_of(kind: str, method: str, *, meta: bool) -> offbeat.Trainer:
    """Of three stages; such as a script builds it in every process."""
    ways: dict[str, dict[str, Any]] = {
        "tower": {"cuts": ["blocks.1", "blocks.3"]},
        "tied": {"stages": 3},
        "list": {},
    }
    return offbeat.Trainer(
        model_of(kind, meta=meta),
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS["momentum"],
        method=METHODS[method],
        seed=3,
        **ways[kind],
    )


def losses_of(trainer: offbeat.Trainer, batches: list[Batch]) -> list[float]:
    found = [trainer.step(x, y) for x, y in batches] + trainer.flush()
    return [float(loss) for loss in found if loss is not None]


def train(folder: str, kind: str, method: str) -> list[float]:
    """From the files in the folder; leaves the weights in another."""
    trainer = trainer_of(kind, method, meta=True)
    trainer.load_state_dict(Path(folder) / kind)
    losses = losses_of(trainer, batches_of(kind))
    trainer.save_pretrained(Path(folder) / f"{kind}-{method}")
    return losses


def train_and_say(folder: str, kind: str, method: str) -> dict[str, str]:
    """What a process answers that has a part of the model, and what it can read of it."""
    trainer = trainer_of(kind, method, meta=True)
    said = {"before": _said(lambda: next(trainer.model.parameters()) + 0)}
    x, y = batches_of(kind)[0]
    said["unread"] = _said(lambda: trainer.step(x, y))
    trainer.load_state_dict(Path(folder) / kind)
    losses_of(trainer, batches_of(kind))
    said |= {
        "gather": _said(trainer.gather),
        "state_dict": _said(trainer.state_dict),
        "drained": _said(lambda: trainer.save(Path(folder) / "drained", drain=True)),
        "read": _said(lambda: [p + 0 for p in trainer.model.parameters()]),
    }
    return said


def stop_and_resume(folder: str, kind: str, method: str) -> list[float]:
    """Half a run, an exact checkpoint, and the rest by a trainer that has read nothing else."""
    trainer, batches = trainer_of(kind, method, meta=True), batches_of(kind)
    trainer.load_state_dict(Path(folder) / kind)
    first = [trainer.step(x, y) for x, y in batches[:4]]
    trainer.save(Path(folder) / f"checkpoints-{kind}-{method}", wait=True)
    again = trainer_of(kind, method, meta=True)
    assert again.resume(Path(folder) / f"checkpoints-{kind}-{method}").step == 4
    rest = losses_of(again, batches[4:])
    again.save_pretrained(Path(folder) / f"{kind}-{method}")
    return [float(loss) for loss in first if loss is not None] + rest


def all_cases(folder: str, cases: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Several runs in the same processes, which take long to start."""
    found = {}
    for kind, method in cases:
        found[f"{kind} {method}"] = train(folder, kind, method)
        files = sorted((Path(folder) / f"{kind}-{method}").glob("*.safetensors"))
        found[f"{kind} {method} resumed"] = stop_and_resume(folder, kind, method)
        assert len(files) in (1, 3), files
    return found


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """Of all files of a folder."""
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_weights(file).items()}


def _said(ask: Any) -> str:
    try:
        ask()
    except offbeat.OffbeatError as error:
        return str(error)
    return ""
