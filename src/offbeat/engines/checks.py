"""What a trainer refuses, and in which words."""

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offbeat.averaging import AllReduce, Averaging, averaging_named
from offbeat.corrections import Correction, Monitor, correction_named
from offbeat.cutting.cut import Cut, Model
from offbeat.engines.shares import Count, Weight, shifts_labels
from offbeat.errors import ConfigurationError, unknown
from offbeat.faults import Faults
from offbeat.guards import Guards
from offbeat.methods import Method, method_named
from offbeat.methods.auto import Auto, Plan, plan_for
from offbeat.methods.base import require_count
from offbeat.optimizers import OptimizerFactory, SchedulerFactory, kind_of
from offbeat.schedules.schedule import Schedule
from offbeat.stages.network import Loss, Penalty

_MOST_REPLICAS = 4096
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def plan_of(
    method: Method | Auto | str, stages: int, optimizer: OptimizerFactory, model: Model
) -> Plan | None:
    """What "auto" comes to; None where a method was named."""
    if isinstance(method, str) and method.strip().lower() == "auto":
        method = Auto()
    if not isinstance(method, Auto):
        return None
    roots = [model] if isinstance(model, nn.Module) else model
    batch_norm = any(isinstance(m, _BATCH_NORMS) for root in roots for m in root.modules())
    named = {p: name for root in roots for name, p in root.named_parameters()}
    kind = kind_of(optimizer, [(name, p) for p, name in named.items()])
    return plan_for(stages, kind, method, batch_norm=batch_norm)


def checked_method(method: Method | Auto | str) -> Method:
    if isinstance(method, str):
        return method_named(method)
    if not isinstance(method, Method):
        raise ConfigurationError(
            f"method={method!r}: give an object such as StaleWeights(), or its name as a string."
        )
    return method


def checked_corrections(corrections: Sequence[Correction | str]) -> tuple[Correction, ...]:
    """The corrections as objects, each kind once."""
    if isinstance(corrections, str | Correction):
        raise ConfigurationError(
            f"corrections={corrections!r}: give a list, as in corrections=[{corrections!r}]."
        )
    if not isinstance(corrections, Iterable):
        raise ConfigurationError(f"corrections={corrections!r}: give a list of them.")
    found = tuple(correction_named(c) if isinstance(c, str) else c for c in corrections)
    for correction in found:
        if not isinstance(correction, Correction):
            raise ConfigurationError(
                f"corrections={corrections!r}: give objects from offbeat.corrections, such as"
                " Predict(), or their names."
            )
        if sum(other.name == correction.name for other in found) > 1:
            raise ConfigurationError(f"corrections: {correction.name} is there twice: give one.")
    return found


def check_corrections_fit(
    corrections: Sequence[Correction], method: Method, schedule: Schedule
) -> None:
    """Refuses what a method with lag would make pointless; says under which."""
    if any(schedule.lags):
        reads_old = any(map(schedule.kept_versions, range(schedule.stages)))
        for correction in corrections:
            try:
                correction.check_rule(method.rule, reads_old_versions=reads_old)
            except ConfigurationError as error:
                raise ConfigurationError(f"under {method.title}, {error}") from None


def checked_monitor(monitor: Monitor | None) -> Monitor | None:
    if monitor is not None and not isinstance(monitor, Monitor):
        raise ConfigurationError(
            f"monitor={monitor!r}: give Monitor() from offbeat.corrections, or None."
        )
    return monitor


def check_probe(monitor: Monitor | None, schedule: Schedule) -> None:
    if monitor is None or not monitor.probe:
        raise ConfigurationError(
            "probe() compares with weights that forwards have read, and these are kept only for a"
            " Trainer(monitor=Monitor(probe=True))."
        )
    if schedule.local_losses:
        raise ConfigurationError(
            "probe() under a method in which every stage has a loss of its own: no gradient comes"
            " late, so there is nothing stale to compare."
        )


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
    if not averaging.bears_missing_replicas:
        raise ConfigurationError(
            f"when_replica_dies='go on' with {averaging}: its sums are made for a fixed number of"
            " replicas. Take exact=True and another averaging, for example DaSGD or DiLoCo."
        )
    return True


def check_factories(optimizer: OptimizerFactory, scheduler: SchedulerFactory | None) -> None:
    for name, factory, example in (
        ("optimizer", optimizer, "lambda params: torch.optim.SGD(params, lr=0.1)"),
        ("scheduler", scheduler, "lambda optimizer: StepLR(optimizer, step_size=30)"),
    ):
        if not callable(factory) and (factory is not None or name == "optimizer"):
            raise ConfigurationError(
                f"{name} is a {type(factory).__name__}: every stage makes its own, so give a"
                f" function, as in {name}={example}."
            )


def warn_of_one_stage(method: Method, stages: int) -> None:
    """Staleness needs stages: without any, an asynchronous method is plain training."""
    if stages == 1 and any(m.asynchronous for m, _ in method.phases()):
        warnings.warn(
            f"{method.title} over one stage is plain training: say how many stages, as in stages=4"
            " (stages=1 if you mean one).",
            stacklevel=3,
        )


def warn_of_idle_corrections(
    corrections: Sequence[Correction], schedules: Sequence[Schedule]
) -> None:
    """Without lag there is nothing to correct, and whoever gives a correction expects some."""
    if corrections and not any(lag for schedule in schedules for lag in schedule.lags):
        names = ", ".join(correction.name for correction in corrections)
        warnings.warn(
            f"corrections={names}: no stage lags here, so nothing is corrected. Give a method with"
            " lag and two stages or more, or leave them out.",
            stacklevel=3,
        )


def check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            "no weight of the model needs a gradient, so there is nothing to train: unfreeze some,"
            " for example with model.requires_grad_(True)."
        )


def checked_seed(seed: int | None) -> int | None:
    if not (seed is None or isinstance(seed, SupportsIndex)) or isinstance(seed, bool | Tensor):
        raise ConfigurationError(f"seed={seed!r}: give a whole number, or None for torch's own.")
    return None if seed is None else index(seed)


def checked_switch(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give True or False.")
    return value


def checked_faults(faults: Faults | None) -> Faults | None:
    if faults is not None and not isinstance(faults, Faults):
        raise ConfigurationError(
            f"faults={faults!r}: give an object of offbeat.faults.Faults, or None."
        )
    return faults


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigurationError(f"folder {folder!r}: give a path, as in 'checkpoints'.")
    return Path(folder)


def checked_loss(loss: Loss) -> Loss:
    if not callable(loss):
        raise ConfigurationError(f"loss={loss!r}: give a function loss(output, target).")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ConfigurationError(
            "the loss has parameters of its own, which no stage would train: put them into the last"
            " stage."
        )
    return loss


def checked_penalty(penalty: Penalty | None) -> Penalty | None:
    if penalty is not None and not callable(penalty):
        raise ConfigurationError(f"penalty={penalty!r}: give a function of named parameters.")
    return penalty


def check_penalty(penalty: Penalty, cut: Cut) -> None:
    """Whether it is a sum over weights: stage by stage it must come to what it is of the whole."""
    names = {id(p): name for name, p in cut.model.named_parameters()}
    if any(map(is_lazy, cut.model.parameters())):
        return  # nobody knows yet
    whole = penalty(list(cut.model.named_parameters()))
    if not isinstance(whole, Tensor) or whole.numel() != 1 or not whole.requires_grad:
        raise ConfigurationError(
            f"penalty= returned {whole!r} for all weights: it must return one number as a tensor,"
            " computed from them without detach(), data or item()."
        )
    parts, counted = [], set()
    for module in cut.modules:
        own = [p for p in module.parameters() if p not in counted]  # each has what is frozen
        counted.update(own)
        with torch.no_grad():
            parts.append(penalty([(names[id(p)], p) for p in own]))
    found, total = float(whole.detach()), sum(map(float, parts))
    if math.isfinite(found) and not math.isclose(found, total, rel_tol=1e-2):
        raise ConfigurationError(
            f"penalty= is {found:g} of all weights and {total:g} stage by stage: it has to be a sum"
            " over weights, since no stage knows those of others. A norm of all has no such sum;"
            " its square has."
        )


def checked_weight(weight: Count | Literal["rows", "sum"] | None, model: nn.Module) -> Weight:
    rows, is_sum = (isinstance(weight, str) and weight == word for word in ("rows", "sum"))
    if weight is not None and not rows and not is_sum and not callable(weight):
        raise ConfigurationError(
            f"weight={weight!r}: give a function weight(x, y) that says how much a part of a batch"
            " counts, as in weight=lambda x, y: (y != -100).sum(), or 'rows', or 'sum' for a loss"
            " that is a sum."
        )
    return Weight(
        function=weight if callable(weight) else None,
        asked_for_rows=rows,
        is_sum=is_sum,
        shifted=shifts_labels(model),
    )


def checked_clip(clip: float | None) -> float | None:
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and not (number and clip > 0):
        raise ConfigurationError(f"clip={clip!r}: give a positive norm, or None for no clipping.")
    return clip


_LONGEST_S = 1e8


def checked_timeout(seconds: float, name: str = "timeout") -> float:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= _LONGEST_S:
        raise ConfigurationError(
            f"{name}={seconds!r}: give seconds, above 0 and at most {_LONGEST_S:g}."
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


def check_streams(
    device: torch.device, replicas: int, averaging: Averaging | None, guards: Guards | None
) -> None:
    """Whether all stages can run side by side on one GPU."""
    if device.type != "cuda":
        found = "there is one" if torch.cuda.is_available() else "torch finds none here"
        raise ConfigurationError(
            f"engine='streams' runs stages side by side on a CUDA GPU ({found}), but the model is"
            f" on {device}: move it with model.to('cuda'), or use engine='serial'."
        )
    if averaging is not None:
        raise ConfigurationError(
            f"engine='streams' with replicas={replicas} and {averaging}: one GPU trains one"
            " replica. Use engine='serial' or one process per replica."
        )
    if guards is not None and guards.drops:
        raise ConfigurationError(
            f"engine='streams' with nonfinite={guards.nonfinite!r}: recordings know where weights"
            " and statistics lie, and these would be put elsewhere. Use nonfinite='stop' or"
            " 'warn', or engine='serial'."
        )


def check_balance(balance: str, engine: str, cut: Cut) -> None:
    """Whether stages can be cut by measured time."""
    if balance not in ("counted", "measured"):
        raise unknown("balance", balance, ("counted", "measured"))
    if balance == "counted":
        return
    if engine == "processes":
        raise ConfigurationError(
            "balance='measured' under processes: each would measure other times and cut elsewhere."
            " Measure in one process, print trainer.cuts and give them as cuts=."
        )
    cut.check_timing()


def check_compile(compile: bool, autocast: torch.dtype | None, methods: Iterable[Method]) -> None:
    """Compiled code may keep a cast of a weight where no hook can see that it is one."""
    for method in methods:
        if compile and autocast is not None and method.rule == "current":
            raise ConfigurationError(
                f"compile=True with autocast={autocast} under {method}: its backward promises the"
                " newest weights, and compiled code may have kept casts of older ones. Use"
                " backward='stash' or backward='recompute'."
            )
