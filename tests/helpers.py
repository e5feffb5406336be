"""What several test files share: small models, plain loops, exact comparison."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import offbeat
from offbeat.engines.serial import Serial
from offbeat.methods import Method
from offbeat.methods.auto import Auto

Batch = tuple[Tensor, Tensor]
Factory = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def cnn(seed: int = 0) -> nn.Sequential:
    """Convolutions, BatchNorm, an in-place layer, a residual block: what usually goes wrong."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Residual(4),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def image_batches(count: int, rows: int = 6, last_rows: int | None = None) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    sizes = [rows] * count
    if last_rows is not None:
        sizes[-1] = last_rows
    return [
        (torch.randn(n, 1, 8, 8, generator=generator), torch.randint(5, (n,), generator=generator))
        for n in sizes
    ]


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(),
        nn.Linear(6, 4),
    ).to(dtype)  # fmt: skip


def vector_batches(count: int, rows: int = 6, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(rows, 6, generator=generator, dtype=dtype),
            torch.randint(4, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def plain_loop(
    model: nn.Sequential,
    batches: Iterable[Batch],
    optimizer: Factory = OPTIMIZERS["momentum"],
    *,
    micro_batches: int = 1,
    clip: float | None = None,
    scheduler: Callable[[Optimizer], Any] | None = None,
    loss: Callable[..., Tensor] = nn.functional.cross_entropy,
) -> tuple[nn.Sequential, list[float]]:
    """Ordinary PyTorch training; returns the trained copy and the losses."""
    model = copy.deepcopy(model)
    steps = optimizer(model.parameters())
    schedule = None if scheduler is None else scheduler(steps)
    losses = []
    for x, y in batches:
        steps.zero_grad()
        total = 0.0
        for part, target in zip(
            x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True
        ):
            share = loss(model(part), target)
            if micro_batches > 1:
                share = share * (len(part) / len(x))
            share.backward()
            total += share.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
        if schedule is not None:
            schedule.step()
        losses.append(total)
    return model, losses


def trainer_for(
    model: nn.Sequential | Sequence[nn.Module],
    method: Method | Auto | str = offbeat.Synchronous(),
    optimizer: Factory = OPTIMIZERS["momentum"],
    **settings: Any,
) -> offbeat.Trainer:
    """A trainer over a copy, so that a test can use its model twice."""
    return offbeat.Trainer(
        copy.deepcopy(model),
        loss=settings.pop("loss", nn.functional.cross_entropy),
        optimizer=optimizer,
        method=method,
        **settings,
    )


def trained(
    model: nn.Sequential | Sequence[nn.Module],
    batches: Iterable[Batch],
    method: Method | str = offbeat.Synchronous(),
    optimizer: Factory = OPTIMIZERS["momentum"],
    **settings: Any,
) -> offbeat.Trainer:
    trainer = trainer_for(model, method, optimizer, **settings)
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    return trainer


def interleave(trainer: offbeat.Trainer, seed: int) -> None:
    """Lets a shuffle choose among the workers that can go on, in place of the serial engine."""
    assert isinstance(trainer._engine, Serial)
    trainer._engine.choose = random.Random(seed).choice


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Every entry, exactly, keys in the same order."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), (
            f"{name} differs by {(ours[name] - value).abs().max()}"
        )
