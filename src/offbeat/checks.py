"""What a trainer refuses, and in which words."""

import warnings
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.averaging import AllReduce, Averaging, EagerDiLoCo, averaging_named
from offbeat.errors import BatchError, ConfigurationError, unknown
from offbeat.guards import Guards
from offbeat.methods import Asynchronous, Method, method_named
from offbeat.methods.base import require_count
from offbeat.nest import Nest
from offbeat.optimizers import OptimizerFactory
from offbeat.schedule import Schedule
from offbeat.stage import Loss

_MOST_REPLICAS = 4096


def checked_method(method: Method | str) -> Method:
    if isinstance(method, str):
        return method_named(method)
    if not isinstance(method, Method):
        raise ConfigurationError(
            f"method={method!r}: give an object such as StaleWeights(), or its name as a string."
        )
    return method


def checked_replicas(replicas: int, averaging: Averaging | str | None) -> Averaging | None:
    """How replicas are kept together; None where there is one and nobody asked."""
    require_count("replicas", replicas)
    if replicas > _MOST_REPLICAS:
        raise ConfigurationError(
            f"replicas={replicas}: each is a copy of the whole model, so give at most"
            f" {_MOST_REPLICAS}."
        )
    if isinstance(averaging, str):
        averaging = averaging_named(averaging)
    if averaging is not None and not isinstance(averaging, Averaging):
        raise ConfigurationError(
            f"averaging={averaging!r}: give an object such as DaSGD(every=4, delay=1) from"
            " offbeat.averaging, or the name of one that needs no settings."
        )
    return AllReduce() if averaging is None and replicas > 1 else averaging


def outlives(when_replica_dies: str, averaging: Averaging | None) -> bool:
    """Whether replicas go on without one that dies."""
    if when_replica_dies not in ("stop", "go on"):
        raise unknown("when_replica_dies", when_replica_dies, ("stop", "go on"))
    if when_replica_dies == "stop":
        return False
    if averaging is None:
        raise ConfigurationError(
            "when_replica_dies='go on' with one replica leaves nobody: give replicas=2 or more, or"
            " leave it out."
        )
    if not averaging.exact or isinstance(averaging, EagerDiLoCo):
        raise ConfigurationError(
            f"when_replica_dies='go on' with {averaging}: its sums are made for a fixed number of"
            " replicas. Take exact=True and another averaging, for example DaSGD or DiLoCo."
        )
    return True


def checked_optimizer(optimizer: OptimizerFactory) -> OptimizerFactory:
    if not callable(optimizer):
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__name__}: every stage makes its own, so give a"
            " function, as in optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
        )
    return optimizer


def warn_of_one_stage(method: Method, stages: int, asked: bool) -> None:
    """Staleness needs stages: without any, an asynchronous method is plain training."""
    if stages == 1 and not asked and any(isinstance(m, Asynchronous) for m, _ in method.phases()):
        warnings.warn(
            f"{method.title} over one stage is plain training: say how many stages, as in stages=4"
            " (stages=1 if you mean one).",
            stacklevel=3,
        )


def check_loader(loader: object) -> None:
    if isinstance(loader, tuple) and all(isinstance(part, Tensor) for part in loader):
        raise BatchError("evaluate() takes a loader of (x, y) pairs; for one batch give [(x, y)].")


def checked_loss(loss: Loss) -> Loss:
    if not callable(loss):
        raise ConfigurationError(f"loss={loss!r}: give a function loss(output, target).")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ConfigurationError(
            "the loss has parameters of its own, which no stage would train: put them into the last"
            " stage."
        )
    return loss


def checked_clip(clip: float | None) -> float | None:
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and not (number and clip > 0):
        raise ConfigurationError(f"clip={clip!r}: give a positive norm, or None for no clipping.")
    return clip


_LONGEST_S = 1e8


def checked_timeout(seconds: float) -> float:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= _LONGEST_S:
        raise ConfigurationError(
            f"timeout={seconds!r}: give seconds, above 0 and at most {_LONGEST_S:g}."
        )
    return seconds


def checked_guards(
    guards: Guards | None, schedules: Sequence[Schedule], method: Method
) -> Guards | None:
    if guards is not None and not isinstance(guards, Guards):
        raise ConfigurationError(
            f"guards={guards!r}: give an object, as in guards=offbeat.Guards(nonfinite='skip')."
        )
    if guards is not None:
        guards.check(schedules, method)
    return guards


def checked_autocast(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.bfloat16):
        raise ConfigurationError(
            f"autocast={dtype}: only torch.bfloat16 is supported; float16 needs loss scaling, which"
            " no stale pipeline can share."
        )
    return dtype


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model."""
    places = {t.device for t in [*model.parameters(), *model.buffers()]}
    if len(places) > 1:
        raise ConfigurationError(
            f"the model lies on {', '.join(sorted(map(str, places)))}: in one process all stages"
            " share one device. Move it with model.to(...)."
        )
    return places.pop() if places else torch.device("cpu")


def check_devices(batch: Nest, device: torch.device) -> None:
    for tensor in nest.tensors(batch):
        if tensor.device != device:
            raise BatchError(
                f"the batch is on {tensor.device}, the model on {device}: move one of them, for"
                f" example x.to({str(device)!r})."
            )


def check_outside_autocast(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        raise BatchError(
            "step() was called inside torch.autocast, whose weight cache would outlive an update."
            " Leave the context and give Trainer(autocast=torch.bfloat16)."
        )


def check_rows(batch: Nest, parts: int, method: Method) -> None:
    """Whether a batch can be split into micro-batches; tensors of x and y are split alike."""
    rows = rows_of(batch)
    if rows < parts:
        raise BatchError(
            f"a batch of {rows} rows cannot make {parts} micro-batches for {method}: give at least"
            f" {parts} rows, or lower accumulate or micro_batches. The batch was not started."
        )
    if parts > 1:
        uneven = {t.size(0) if t.dim() else 0 for t in nest.tensors(batch)} - {rows}
        if uneven:
            raise BatchError(
                f"x has {rows} rows and another tensor of the batch {min(uneven)}: to split a batch"
                " into micro-batches all tensors of x and y need the same first size."
            )


def rows_of(batch: Nest) -> int:
    first = nest.tensors(batch)[0]
    return first.size(0) if first.dim() else 1


def checksum_of(values: Nest) -> int:
    """A number that tells two batches apart: every byte of every tensor, in order."""
    checksum = 0
    for tensor in nest.tensors(values):
        flat: Tensor = tensor.detach().cpu().contiguous().reshape(-1)
        checksum = crc32(flat.view(torch.uint8).numpy().data, checksum)
    return checksum


def chosen_engine(engine: str | None, launched: bool) -> str:
    """The engine asked for, or the one the script was started for."""
    if engine not in (None, "serial", "processes"):
        raise unknown("engine", engine, ("serial", "processes"))
    if engine == "processes" and not launched:
        raise ConfigurationError(
            "engine='processes' needs one process per stage: start the script with"
            " torchrun --nproc-per-node K, or use offbeat.launch."
        )
    return engine or ("processes" if launched else "serial")
