"""The model that is trained, and every way to train it that takes part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from benchmarks.sleeping import slept
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.averaging import AllReduce, Averaging, DaSGD, LocalSGD

Compute = Literal["real", "sleep"]
CLASSES = 10
EVERY, KEEP = 4, 0.25
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Freed memory stays in the process. Otherwise glibc gives it back and fetches it again in every
step for some contestants and not for others, by chance, which costs up to a tenth of a step."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A chain of linear layers of one width, and what a step of it costs."""

    compute: Compute
    width: int
    layers: int
    rows: int
    """Of one replica's batch."""
    sleep_s: float
    """Sleeping: what forward and backward of a step take together, a third and two thirds."""

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (self.width + 1)


class Sleeping(nn.Module):
    """A linear layer that takes as long as it is told; its weights are as many as ever."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        # The backward sleeps first: this layer's gradients exist when its time has passed.
        return slept(self.linear(x), self._seconds)


def model_of(work: Work) -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(0)
    if work.compute == "sleep":
        seconds = work.sleep_s / 3 / work.layers
        return nn.Sequential(*(Sleeping(work.width, seconds) for _ in range(work.layers)))
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.ReLU()]
    return nn.Sequential(*layers)


def batch_of(work: Work, rank: int) -> tuple[Tensor, Tensor]:
    """Every replica has its own."""
    draws = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(work.rows, work.width, generator=draws)
    return x, torch.randint(CLASSES, (work.rows,), generator=draws)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[:, :CLASSES], target)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A contestant before it is built."""

    name: str
    kind: Literal["alone", "link", "ddp", "offbeat"]
    averaging: Averaging | None = None
    bucket_mb: int | None = None
    """DDP's; None for its default."""
    every: int = 1
    """Steps from one average to the next."""
    delay: int = 0
    """Steps an average may take before somebody waits for it."""


def da_sgd(delay: int) -> Spec:
    averaging = DaSGD(every=EVERY, delay=delay, keep=KEEP, exact=False)
    return Spec(
        name=f"DaSGD delay {delay}", kind="offbeat", averaging=averaging, every=EVERY, delay=delay
    )


ALONE = Spec(name="alone", kind="alone")
LINK = Spec(name="bare all-reduce", kind="link")
DDP = Spec(name="DDP", kind="ddp")
SPECS: tuple[Spec, ...] = (
    ALONE,
    LINK,
    DDP,
    # Buckets of the default 25 MB hold nearly the whole model, so that little could overlap.
    Spec(name="DDP 1 MB buckets", kind="ddp", bucket_mb=1),
    Spec(name="AllReduce", kind="offbeat", averaging=AllReduce(exact=False)),
    Spec(
        name="LocalSGD", kind="offbeat", averaging=LocalSGD(every=EVERY, exact=False), every=EVERY
    ),
    da_sgd(1),
    da_sgd(2),
    da_sgd(4),
)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """What takes turns: ``step`` trains a batch, ``settle`` leaves the link idle afterwards."""

    spec: Spec
    step: Callable[[], object]
    settle: Callable[[], object]
    trainer: offbeat.Trainer | None = None


def build(spec: Spec, work: Work) -> Contestant:
    """The contestant in this process; every process builds all of them in the same order."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    x, y = batch_of(work, rank)
    if spec.kind == "link":
        row = torch.zeros(work.parameters)
        return Contestant(spec=spec, step=lambda: dist.all_reduce(row), settle=_nothing)
    model = model_of(work)
    if spec.kind == "offbeat":
        trainer = offbeat.Trainer(
            [model],
            loss=loss_of,
            optimizer=optimizer_of,
            replicas=dist.get_world_size(),
            averaging=spec.averaging,
            timeout=120.0,
        )
        return Contestant(
            spec=spec, step=lambda: trainer.step(x, y), settle=trainer.flush, trainer=trainer
        )
    trained: nn.Module = model
    if spec.kind == "ddp":
        trained = DistributedDataParallel(model, bucket_cap_mb=spec.bucket_mb)
    optimizer = optimizer_of(trained.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss_of(trained(x), y).backward()
        optimizer.step()

    return Contestant(spec=spec, step=step, settle=_nothing)


def _nothing() -> None:
    pass
