"""Processes whose scripts have the habits of Hugging Face's users; one call per process."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import offbeat
from offbeat.errors import WorkerLost


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as a tokenizer's BatchEncoding is."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Speaker(nn.Module):
    """Blocks between two ends, with a loss of its own; whoever calls it names its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.outlet = nn.Linear(6, 9)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = True
    ) -> dict[str, Any]:
        hidden = self.inlet(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        output: dict[str, Any] = {"logits": self.outlet(hidden)}
        if labels is not None:
            output["loss"] = nn.functional.cross_entropy(
                output["logits"].flatten(0, 1), labels.flatten()
            )
        if use_cache:
            output["past"] = object()
        return output


def speaker() -> Speaker:
    torch.manual_seed(0)
    return Speaker()


def encodings(count: int = 5, rows: int = 4) -> list[Encoding]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(9, (rows, 5), generator=generator) for _ in range(count)]
    return [Encoding(input_ids=each, labels=each.roll(1, 1)) for each in ids]


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        for batch in encodings():
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                yield {"input_ids": ids, "labels": labels}


def trainer_of(model: nn.Module, **settings: Any) -> offbeat.Trainer:
    usual: dict[str, Any] = {"method": "pipedream", "stages": 2, "timeout": 60.0}
    return offbeat.Trainer(
        model,
        loss=lambda output, y: output["loss"],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        seed=1,
        **{**usual, **settings},
    )


def accuracy(output: Any, labels: Tensor) -> Tensor:
    hits: Tensor = output["logits"].argmax(-1) == labels
    return hits.float().mean()


def train_and_look(**settings: Any) -> dict[str, Any]:
    """Everything that a script reads, before the first step and in the middle of a run."""
    trainer = trainer_of(speaker(), **settings)
    loader = DataLoader(Stream(), batch_size=4)
    before = trainer.predict(encodings(2))
    losses = [trainer.step(x, y) for x, y in trainer.batches(loader)]
    found = trainer.evaluate(encodings(3), metrics={"accuracy": accuracy})
    after = trainer.predict([encodings(1)[0]["input_ids"]])
    return {
        "losses": [None if loss is None else float(loss) for loss in losses],
        "owed": list(map(float, trainer.flush())),
        "found": found,
        "before": before,
        "after": after,
    }


def ask_alone(asked: str, then: str) -> tuple[float, str]:
    """Rank 0 asks for something that the other never asks for: how long until it is told."""
    trainer = trainer_of(speaker())
    batch = encodings(1)[0]
    trainer.step(batch)
    started = time.monotonic()
    try:
        if trainer.rank == 0:
            getattr(trainer, asked)()
        elif then == "end":
            return 0.0, ""
        else:
            for _ in range(50):
                trainer.step(batch)
    except WorkerLost as error:
        return time.monotonic() - started, str(error)
    return -1.0, "nothing was said"


def groups_by_name(**settings: Any) -> dict[str, Any]:
    """Biases are frozen by a group of their own."""

    def groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        kinds = [("weight", 0.5), ("bias", 0.0)]
        return torch.optim.SGD(
            [
                {"params": [p for n, p in named if n.endswith(end)], "lr": rate}
                for end, rate in kinds
            ]
        )

    trainer = trainer_of(speaker(), **settings)
    torch.manual_seed(0)
    model = Speaker()
    trainer = offbeat.Trainer(
        model, loss=lambda output, y: output["loss"], optimizer=groups, seed=1,
        method="pipedream", stages=2, **settings,
    )  # fmt: skip
    for batch in encodings():
        trainer.step(batch)
    trainer.flush()
    return trainer.state_dict()
