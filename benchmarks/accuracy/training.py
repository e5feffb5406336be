"""One run: networks of one kind, a seed each, trained one way as one ensemble."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any, Protocol

import torch
from benchmarks.accuracy.configurations import BASELINE, WAYS
from benchmarks.accuracy.ensemble import GroupedNorm, ensemble, side_by_side, summed_loss
from benchmarks.jobs import Asked, share_of_rate
from benchmarks.pool import cleared_up, memory_gib
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.zoo import network

LOOKS_EVERY = 50
"""Updates between two looks at the clock."""
GIB, MIB_AN_IMAGE, MIB_AN_IMAGE_DEEP = 1.5, 3.3, 6.0
"""Of the GPU, as seen: what a run takes for itself and per image at work (deep: ResNet-56)."""


class Images(Protocol):
    """Training images for many seeds at once, and test images, on the device."""

    test: list[tuple[Tensor, Tensor]]

    def __len__(self) -> int: ...

    def batches_of(
        self, seeds: Sequence[int], size: int, *, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True, kw_only=True)
class Job(Asked):
    own = ("stages", "cuts", "ppv", "way", "seeds")

    network: str
    stages: int | None
    cuts: tuple[int, ...] | None
    ppv: tuple[int, ...] | None
    way: str
    seeds: tuple[int, ...]
    epochs: int
    rows: int
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    bf16: bool
    compiled: bool = False
    kernels: str = "separate"
    """"separate": an operation at a time, gradients rounded to bfloat16, as PyTorch does under
    autocast and ensembles did at first; "fused": what ensembles do on a GPU now. BP of the one is
    not compared with ways of the other."""


def train(job: Job, data: Images, device: torch.device, until: float) -> dict[str, Any] | None:
    """What a run found; None if it could not end in time."""
    return cleared_up(lambda: _train(job, data, device, until), device)


def _train(job: Job, data: Images, device: torch.device, until: float) -> dict[str, Any] | None:
    per_epoch = min(len(data), job.rows) // job.batch
    trainer = trainer_of(job, device, job.epochs * per_epoch)
    # Recordings are made by then; a short run has at least its second half without them.
    warm = min(LOOKS_EVERY, job.epochs * per_epoch // 2)
    start, done, warm_s = time.monotonic(), 0, 0.0
    made: dict[str, Any] = {}
    for epoch in range(job.epochs):
        for images, labels in data.batches_of(job.seeds, job.batch, epoch=epoch):
            trainer.step(*_fed(job, images, labels))
            done += 1
            if done == 1:
                made = _described(trainer)
            if done == warm:
                warm_s = _passed_s(start, device)
            if done % LOOKS_EVERY == 0 and time.monotonic() > until:
                return None
    trainer.flush()
    trained_s = _passed_s(start, device)
    scores = evaluated(trainer.model, data.test, job, device)
    seconds = time.monotonic() - start
    return {
        "accuracies": scores,
        **made,
        "seconds": round(seconds, 2),
        "ms_per_update": round(1e3 * (trained_s - warm_s) / (done - warm), 3) if warm else None,
        "memory_gib": memory_gib(device),
    }


def _passed_s(start: float, device: torch.device) -> float:
    """Since then, all that was queued included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - start


def gib_of(job: Job) -> float:
    """About what a run takes of the GPU, so that runs beside each other find enough."""
    stages = job.stages or len(job.cuts or job.ppv or ()) + 1
    method, _ = WAYS[job.way].method(1000).phases()[0]
    schedule = method.schedule(stages)
    at_work = 1 + fmean(schedule.in_flight(stage) for stage in range(stages))
    images = at_work * job.batch * len(job.seeds) / schedule.micro_batches
    an_image = MIB_AN_IMAGE_DEEP if job.network == "resnet-56" else MIB_AN_IMAGE
    return GIB + images * an_image / 1024


def trainer_of(job: Job, device: torch.device, updates: int) -> offbeat.Trainer:
    way = WAYS[job.way]
    streams = device.type == "cuda"
    together = len(job.seeds) > 1
    if together:  # channels last by themselves
        model = ensemble(partial(network, job.network), job.seeds).to(device)
    else:
        torch.manual_seed(job.seeds[0])
        model = network(job.network).to(device)
        if job.bf16:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    if way.slow_statistics:
        slow_down_statistics(model, way.method(updates).schedule(job.stages or 1).micro_batches)

    def optimizer(params: Any) -> SGD:
        settings: dict[str, Any] = {"momentum": job.momentum, "weight_decay": job.weight_decay}
        if streams:  # so that updates can be recorded
            return SGD(params, lr=torch.tensor(job.lr, device=device), fused=True, **settings)
        return SGD(params, lr=job.lr, **settings)

    return offbeat.Trainer(
        model,
        loss=summed_loss if together else F.cross_entropy,
        optimizer=optimizer,
        scheduler=lambda made: LambdaLR(made, lambda update: share_of_rate(update, updates)),
        method=way.method(updates),
        corrections=list(way.corrections),
        **_cut_of(job),
        seed=job.seeds[0],
        autocast=torch.bfloat16 if job.bf16 else None,
        engine="streams" if streams else "serial",
        compile=job.compiled,
    )


def slow_down_statistics(model: nn.Module, parts: int) -> None:
    """Running statistics then move as far in ``parts`` micro-batches as in a batch before."""
    for module in model.modules():
        if isinstance(module, GroupedNorm | nn.BatchNorm2d):
            assert module.momentum is not None
            module.momentum = 1 - (1 - module.momentum) ** (1 / parts)


def _cut_of(job: Job) -> dict[str, Any]:
    if job.way == BASELINE:
        return {"stages": 1}
    if len(job.seeds) == 1 and job.cuts is None:
        return {"stages": job.stages, "ppv": job.ppv}
    return {"cuts": job.cuts or places(job.network, job.stages, job.ppv)}


@cache
def places(name: str, stages: int | None, ppv: tuple[int, ...] | None) -> tuple[int, ...]:
    """Where a single network is cut: an ensemble has layers of its own, which nobody counts."""
    trainer = offbeat.Trainer(
        network(name),
        loss=F.cross_entropy,
        optimizer=lambda params: SGD(params, lr=0.0),
        method=offbeat.PipeDream(),
        stages=stages,
        ppv=ppv,
        engine="serial",
    )
    trainer.step(torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long))
    assert trainer.cuts is not None
    return tuple(int(place) for place in trainer.cuts)


def _fed(job: Job, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of (seeds, rows, ...) what the model takes."""
    if len(job.seeds) > 1:
        return side_by_side(images.unbind()), labels.T.contiguous()
    x = images[0].contiguous(memory_format=torch.channels_last) if job.bf16 else images[0]
    return x, labels[0]


@torch.no_grad()
def evaluated(
    model: nn.Module, test: list[tuple[Tensor, Tensor]], job: Job, device: torch.device
) -> list[float]:
    """Test accuracy of every network."""
    count = len(job.seeds)
    hits = torch.zeros(count, dtype=torch.long, device=device)
    rows = 0
    model.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=job.bf16):
        for x, y in test:
            images = side_by_side([x] * count) if job.bf16 else x.repeat(1, count, 1, 1)
            outputs = model(images).view(len(y), count, -1)
            hits += (outputs.argmax(2) == y[:, None]).sum(0)
            rows += len(y)
    return [round(hit / rows, 5) for hit in hits.tolist()]


def _described(trainer: offbeat.Trainer) -> dict[str, Any]:
    """Of the first phase: lags, places, and the share of all weights in stages that lag."""
    counts = [sum(p.numel() for p in worker.stage.parameters) for worker in trainer._engine.workers]
    stale = sum(count for count, lag in zip(counts, trainer.lags, strict=True) if lag)
    return {
        "lags": list(trainer.lags),
        "places": list(trainer.cuts or ()),
        "stale_share": round(stale / sum(counts), 4),
    }
