"""From an experiment to the trainer it describes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from offbeat.app.experiment import Experiment
from offbeat.averaging import Averaging, averaging_named
from offbeat.averaging.sharding import shards_of
from offbeat.corrections import Correction, Monitor, correction_named
from offbeat.errors import BatchError, ConfigurationError
from offbeat.guards import Guards
from offbeat.methods import Method, Phases, Synchronous, method_named
from offbeat.methods.auto import Auto
from offbeat.optimizers import Muon
from offbeat.trainer import Trainer
from offbeat.zoo import Data, data_named, network_for


def data_of(experiment: Experiment) -> Data:
    choice = experiment.data
    if "folder" in choice.settings:
        raise ConfigurationError(
            f"data {choice.name}: the folder is given by --data-folder, not as a setting:"
            f" --data-folder {choice.settings['folder']}."
        )
    return data_named(choice.name, folder=experiment.data_folder, **choice.settings)


def build(experiment: Experiment, data: Data, steps_per_epoch: int) -> Trainer:
    """The trainer an experiment describes."""
    torch.manual_seed(experiment.seed)
    model = network_for(data, experiment.model.name, **experiment.model.settings)
    cuts: Any = [int(cut) if cut.isdigit() else cut for cut in experiment.cuts] or None
    nonfinite: Any = experiment.nonfinite or (None if experiment.max_lag is None else "warn")
    return Trainer(
        model.to(device_of(experiment.device)),
        loss=data.loss,
        optimizer=optimizer_factory(experiment),
        method=method_of(experiment, steps_per_epoch),
        corrections=corrections_of(experiment) or None,
        monitor=Monitor(probe=True) if experiment.monitor else None,
        stages=experiment.stages,
        cuts=cuts,
        ppv=experiment.ppv or None,
        replicas=experiment.replicas,
        averaging=averaging_of(experiment),
        scheduler=scheduler_factory(experiment, experiment.epochs * steps_per_epoch),
        clip=experiment.clip,
        guards=nonfinite and Guards(nonfinite=nonfinite, max_lag=experiment.max_lag),
        seed=experiment.seed,
        autocast=torch.bfloat16 if experiment.autocast else None,
        engine=experiment.engine,  # type: ignore[arg-type]  # checked by the trainer
        balance=experiment.balance,  # type: ignore[arg-type]
        compile=experiment.compile,
    )


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise ConfigurationError(f"device={name!r}: give cpu, cuda or cuda:1.") from None
    if device.type == "meta":
        raise ConfigurationError(f"device={name!r}: it holds no numbers. Give --device cpu.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device={name!r}: PyTorch sees no GPU here. Give --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device={name!r}: PyTorch sees {torch.cuda.device_count()} GPUs here, counted from 0."
            " Give the number of one of them."
        )
    if device.type != "cuda":  # there a tensor would take memory of a GPU that others use
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, ImportError, AssertionError):
            raise ConfigurationError(
                f"device={name!r}: PyTorch cannot use it here. Give --device cpu."
            ) from None
    return device


def method_of(experiment: Experiment, steps_per_epoch: int) -> Method | Auto:
    name, settings, hybrid = experiment.method.name, experiment.method.settings, experiment.hybrid
    if name.lower() != "auto":
        method = method_named(name, **settings)
        if hybrid is None:
            return method
        return Phases((method, hybrid * steps_per_epoch), (Synchronous(), None))
    if hybrid is not None:
        raise ConfigurationError(
            "hybrid with method auto: run auto once, and give the method it prints by its name."
        )
    odd = sorted(set(settings) - {"hop"})
    if odd:
        raise ConfigurationError(f"auto has no setting {odd[0]!r}: it takes hop.")
    return Auto(batch=max(1, experiment.batch_size // experiment.replicas), **settings)


def corrections_of(experiment: Experiment) -> list[Correction]:
    return [correction_named(choice.name, **choice.settings) for choice in experiment.correction]


def averaging_of(experiment: Experiment) -> Averaging | None:
    choice = experiment.averaging
    if choice is not None and experiment.replicas == 1:
        raise ConfigurationError(
            f"averaging={choice} with one replica has nobody to average with: give replicas=2 or"
            " more (--replicas), or leave it out."
        )
    return None if choice is None else averaging_named(choice.name, **choice.settings)


def optimizer_factory(
    experiment: Experiment,
) -> Callable[[list[nn.Parameter]], Optimizer | list[Optimizer]]:
    """One optimizer per stage; Muon gets the matrices and AdamW the rest."""
    lr, decay, momentum = experiment.lr, experiment.weight_decay, experiment.momentum
    # CUDA graphs read a rate that changes from the device; corrections need it on the host.
    recorded = experiment.engine == "streams" and not experiment.correction

    def make(params: list[nn.Parameter]) -> Optimizer | list[Optimizer]:
        rate: Any = torch.tensor(lr, device=params[0].device) if recorded else lr
        usual: dict[str, Any] = {"lr": rate, "weight_decay": decay}
        try:
            if experiment.optimizer == "sgd":
                fused = True if recorded else None
                return torch.optim.SGD(params, momentum=momentum, fused=fused, **usual)
            kind = torch.optim.Adam if experiment.optimizer == "adam" else torch.optim.AdamW
            if experiment.optimizer != "muon":
                return kind(params, capturable=recorded, **usual)
            matrices = [p for p in params if p.dim() == 2]
            others = [p for p in params if p.dim() != 2]
            both: list[Optimizer] = [Muon(matrices, momentum=momentum, **usual)] if matrices else []
            return [*both, kind(others, capturable=recorded, **usual)] if others else both
        except ValueError as error:
            raise ConfigurationError(
                f"optimizer {experiment.optimizer} with lr={lr}, momentum={momentum} and"
                f" weight_decay={decay}: {error}. Give numbers that it takes."
            ) from None

    return make


def scheduler_factory(experiment: Experiment, updates: int) -> Callable[[Optimizer], LambdaLR]:
    """The learning rate by update, as a share of its peak."""
    warmup = experiment.warmup
    if experiment.decay == "one-cycle" and not warmup:
        warmup = updates // 4

    def share(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        done = (update - warmup) / max(1, updates - warmup)
        if experiment.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if experiment.decay in ("linear", "one-cycle"):
            return max(0.01, 1 - done)
        if experiment.decay == "step":
            passed = sum(update >= milestone * updates for milestone in experiment.milestones)
            return float(0.1**passed)
        return 1.0

    return lambda optimizer: LambdaLR(optimizer, share)


def check_batches(experiment: Experiment, data: Data, trainer: Trainer) -> None:
    """Whether the first and the last batch of an epoch can be trained on, before either is."""
    parts = trainer.replicas // trainer.replicas_here
    size, drop_last = experiment.batch_size, experiment.drop_last
    count = data.train.count(size, train=True, drop_last=drop_last)
    for number in {0, count - 1}:
        x, _ = data.train.batch(size, number, train=True, augment=False, seed=0, epoch=0)
        rows = torch.zeros(len(x), device=trainer.device)
        try:
            part = shards_of(rows, parts)[0]
            trainer.check_batch(part, part)
        except BatchError as error:
            last = " It is the last of an epoch: --drop-last leaves it out." if number else ""
            raise ConfigurationError(f"{error}{last}") from None
