"""One run: a configuration, a seed, a learning rate."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.averaging.configurations import CONFIGURATIONS
from benchmarks.averaging.data import Cifar
from benchmarks.pool import cleared_up
from benchmarks.stored import Row
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.zoo import resnet
from offbeat.zoo.resnet import GlobalAverage

PEAK_AT, LOWEST = 0.25, 0.01


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of a file share."""

    model: str
    """"cnn", or the depth of a ResNet."""
    rows: int
    test_rows: int
    epochs: int
    replicas: int
    rows_per_replica: int
    momentum: float
    weight_decay: float
    autocast: bool
    channels_last: bool

    @property
    def batch(self) -> int:
        return self.replicas * self.rows_per_replica

    @property
    def steps(self) -> int:
        return self.epochs * (self.rows // self.batch)


@dataclass(frozen=True, kw_only=True)
class Job:
    configuration: str
    seed: int
    lr: float
    setting: Setting


def model_named(name: str) -> nn.Sequential:
    if name != "cnn":
        return resnet(int(name))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        GlobalAverage(),
        nn.Linear(16, 10),
    )


def share_of_peak(step: int, steps: int) -> float:
    """One cycle: linear up for a quarter of the run, linear down to a hundredth."""
    peak = max(1, round(PEAK_AT * steps))
    rising = step / peak
    share = rising if step < peak else 1 - (step - peak) / max(1, steps - peak)
    return LOWEST + (1 - LOWEST) * max(0.0, share)


def network_for(job: Job, device: torch.device) -> nn.Module:
    torch.manual_seed(job.seed)
    model = model_named(job.setting.model).to(device)
    if job.setting.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def trainer_for(job: Job, device: torch.device) -> offbeat.Trainer:
    setting = job.setting
    model = network_for(job, device)

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.SGD:
        return torch.optim.SGD(
            parameters,
            lr=job.lr,
            momentum=setting.momentum,
            weight_decay=setting.weight_decay,
            fused=device.type == "cuda",
        )

    return offbeat.Trainer(
        model,
        loss=_loss,
        optimizer=sgd,
        scheduler=lambda optimizer: LambdaLR(
            optimizer, lambda step: share_of_peak(step, setting.steps)
        ),
        replicas=setting.replicas,
        averaging=CONFIGURATIONS[job.configuration].averaging,
        seed=job.seed,
        autocast=torch.bfloat16 if setting.autocast else None,
    )


def _loss(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output.float(), target)


def train(job: Job, data: Cifar, device: torch.device, until: float) -> Row | None:
    """What a run found; None if it could not end in time."""
    return cleared_up(lambda: _train(job, data, device, until), device)


def _train(job: Job, data: Cifar, device: torch.device, until: float) -> Row | None:
    """Trains and scores: replica 0 as it is, then the average of all."""
    setting, began = job.setting, time.monotonic()
    trainer = trainer_for(job, device)
    losses: list[Tensor] = []
    for epoch in range(setting.epochs):
        losses.clear()  # the last epoch's are reported
        for x, y in data.batches(setting.batch, seed=job.seed, epoch=epoch):
            if time.monotonic() > until:
                return None
            loss = trainer.step(_laid_out(x, setting), y)
            assert loss is not None
            losses.append(loss)
    train_loss = float(torch.stack(losses).mean())
    trained = time.monotonic()
    test = [(_laid_out(x, setting), y) for x, y in data.test]
    replica = trainer.evaluate(test, of="replica")
    trainer.flush()
    average = trainer.evaluate(test)
    configuration = CONFIGURATIONS[job.configuration]
    return {
        "kept": configuration.kept,
        "averaging": repr(configuration.averaging),
        "accuracy": average.accuracy,
        "loss": _finite(average.loss),
        "replica_accuracy": replica.accuracy,
        "replica_loss": _finite(replica.loss),
        "last_epoch_train_loss": _finite(train_loss),
        "test_rows": average.rows,
        "train_s": round(trained - began, 2),
        "seconds": round(time.monotonic() - began, 2),
    }


def _laid_out(x: Tensor, setting: Setting) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if setting.channels_last else x


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
