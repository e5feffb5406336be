"""What checkpoint tests and the fault drill run: importable jobs, one call per process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import offbeat
from helpers import Batch, cnn, image_batches, trainer_for, vector_batches
from jobs import dropout_net, tied_net
from offbeat import averaging, methods
from offbeat.averaging import (
    AllReduce,
    Averaging,
    DaSGD,
    OverlapLocalSGD,
    PostLocalSGD,
    StreamingDiLoCo,
)
from offbeat.checkpoints import tensorfile
from offbeat.corrections import (
    CORRECTIONS,
    ClipPerStage,
    Correction,
    GapAware,
    Predict,
    RateByLag,
    SpikeCompensation,
)
from offbeat.engines.checks import check_corrections_fit
from offbeat.errors import ConfigurationError, OffbeatError, StoppedError
from offbeat.methods import (
    ADL,
    DDG,
    DSP,
    GPipe,
    Method,
    Phases,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)

STEPS = 11
ROWS = 8

SETTINGS: dict[str, Any] = {
    "every": 3, "delay": 2, "switch": 4, "times": 3.0, "size": 2, "rounds": 2
}  # fmt: skip
"""For settings without a default, by name."""


def example_of(kind: Any) -> Any:
    """An object of any class of METHODS, AVERAGINGS or CORRECTIONS."""
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    unknown = sorted({*needed} - {*SETTINGS})
    assert not unknown, (
        f"{kind.__name__} has no defaults for {unknown}: give examples of them in SETTINGS of"
        " tests/checkpoint_jobs.py, so that checkpoints are tested with it."
    )
    values = {name: SETTINGS[name] for name in needed}
    if kind is ClipPerStage:  # of norm and times one is needed
        values = {"times": SETTINGS["times"]}
    return kind(**values)


def one_of_each(kinds: Iterable[Any], *instead: Any) -> list[Any]:
    """An object of every class of a registry; ``instead``: those with other settings."""
    given = {type(thing): thing for thing in instead}
    return [given[kind] if kind in given else example_of(kind) for kind in kinds]


THREE_PHASES = Phases((StaleWeights(), 4), (DDG(), 3), (Synchronous(), None))

METHODS: list[Method] = [
    *one_of_each(methods.METHODS, GPipe(2), ADL(accumulate=3)),
    # every rule, with lag, with micro-batches half-way and with versions by name
    StaleWeights(backward="stash"),
    StaleWeights(backward="recompute"),
    ADL(accumulate=3, backward="current"),
    ADL(accumulate=3, backward="recompute"),
    PipeDream2BW(backward="current"),
    PipeDream2BW(backward="recompute"),
    DSP(lag=(5, 3, 0)),
    THREE_PHASES,
]

AVERAGINGS: list[Averaging] = [
    *one_of_each(
        averaging.AVERAGINGS,
        PostLocalSGD(every=2, switch=4),
        DaSGD(every=3, delay=2, keep=0.25),
        OverlapLocalSGD(every=3, momentum=0.7),
        StreamingDiLoCo(every=4, delay=2, fragments=2),
    ),
    AllReduce(compress="int8"),
    DaSGD(every=3, delay=2, keep=0.25, compress="int8"),
    DaSGD(every=3, delay=2, compress="bf16", warmup=2, optimizer_state="average"),
]

CORRECTED: list[list[Correction]] = [
    [],
    *([correction] for correction in one_of_each(CORRECTIONS)),
    [Predict(horizon="fitted"), SpikeCompensation()],
    [Predict(direction="difference"), RateByLag(), GapAware()],
]


def fit(corrections: list[Correction], method: Method, stages: int) -> bool:
    """Whether a method can be corrected so."""
    try:
        for phase, _ in method.phases():
            check_corrections_fit(corrections, phase, phase.schedule(stages))
    except ConfigurationError:
        return False
    return True


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=100)


def job_of(model: str, steps: int = STEPS) -> tuple[nn.Sequential, list[Batch]]:
    if model == "cnn":
        return cnn(), image_batches(steps, rows=ROWS)
    network = tied_net() if model == "ties" else dropout_net()
    return network, vector_batches(steps, rows=ROWS, dtype=torch.float32)


def fresh(model: str, method: Method, **settings: Any) -> offbeat.Trainer:
    """The trainer as a script would build it, every time it is started."""
    network, _ = job_of(model, steps=1)
    return trainer_for(network, method, adamw, seed=3, scheduler=one_cycle, **settings)


def reading(trainer: offbeat.Trainer) -> list[tuple[Any, ...]]:
    """The ledger without its times, in an order that no process layout changes."""
    return sorted((e.kind, e.stage, e.batch, e.version, repr(e.loss), e.replica)
                  for e in trainer.ledger)  # fmt: skip


def go_on(trainer: offbeat.Trainer, batches: list[Batch]) -> list[float | None]:
    """Trains to the end and drains; the losses."""
    losses: list[Tensor | None] = [trainer.step(x, y) for x, y in trainer.batches(batches)]
    losses += trainer.flush()
    return [None if loss is None else float(loss) for loss in losses]


def end_of(trainer: offbeat.Trainer, losses: list[float | None]) -> dict[str, Any]:
    return {
        "state": trainer.state_dict(),
        "losses": losses,
        "ledger": reading(trainer),
        "memory": trainer.memory(),
    }


def interrupted(
    folder: Path, model: str, method: Method, at: int, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the run ends that resumed after ``at`` steps, and how the one that was saved there."""
    _, batches = job_of(model)
    whole = fresh(model, method, **settings)
    for x, y in whole.batches(batches[:at]):
        whole.step(x, y)
    whole.save(folder)
    held = whole.memory()
    losses = go_on(whole, batches[at:])
    whole.finish_saving()
    again = fresh(model, method, **settings)
    assert again.resume(folder).step == at
    held_again = again.memory()
    ours = end_of(again, go_on(again, batches[at:])) | {"held": held_again}
    return ours, end_of(whole, losses) | {"held": held}


def interrupted_all(
    folder: str, jobs: list[tuple[str, Method, int, dict[str, Any]]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        interrupted(Path(folder) / str(number), model, method, at, **settings)
        for number, (model, method, at, settings) in enumerate(jobs)
    ]


Job = tuple[str, Method, int, dict[str, Any]]


def save_all(folder: str, jobs: list[Job]) -> list[dict[str, Any]]:
    """Saves each run after some steps and trains it to its end."""
    ends = []
    for number, (model, method, at, settings) in enumerate(jobs):
        _, batches = job_of(model)
        trainer = fresh(model, method, **settings)
        for x, y in trainer.batches(batches[:at]):
            trainer.step(x, y)
        trainer.save(Path(folder) / str(number), wait=True)
        held = trainer.memory()
        ends.append(end_of(trainer, go_on(trainer, batches[at:])) | {"held": held})
    return ends


def resume_all(folders: list[str], jobs: list[Job]) -> list[list[dict[str, Any]]]:
    """Goes on from what each of several layouts of processes has saved."""
    ends: list[list[dict[str, Any]]] = []
    for folder in folders:
        ends.append([])
        for number, (model, method, at, settings) in enumerate(jobs):
            _, batches = job_of(model)
            trainer = fresh(model, method, **settings)
            assert trainer.resume(Path(folder) / str(number)).step == at
            held = trainer.memory()
            ends[-1].append(end_of(trainer, go_on(trainer, batches[at:])) | {"held": held})
    return ends


def assert_same_end(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """No bit differs in weights, losses, ledger and what was held."""
    assert list(ours["state"]) == list(theirs["state"])
    for name, value in theirs["state"].items():
        assert torch.equal(ours["state"][name], value), name
    assert ours["losses"] == theirs["losses"]
    assert ours["ledger"] == theirs["ledger"]
    for key in ("memory", "held"):
        copies = [[(m.weight_copies, m.peak_weight_copies, m.graphs, m.inputs, m.peak_in_flight,
                    m.weight_bytes) for m in end[key]] for end in (ours, theirs)]  # fmt: skip
        assert copies[0] == copies[1], key


def unpunctual(folder: str) -> list[float]:
    """Loads weights, and resumes, with rank 1 late each time."""
    _, batches = job_of("dropout")
    trainer = fresh("dropout", StaleWeights(), stages=2, timeout=20)
    read = tensorfile.read

    def late(*given: Any) -> Any:
        time.sleep(0.5 * trainer.rank)
        return read(*given)

    for x, y in batches[:3]:
        trainer.step(x, y)
    trainer.flush()
    state = trainer.state_dict()
    time.sleep(0.5 * trainer.rank)
    trainer.load_state_dict(state)
    for x, y in batches[3:6]:
        trainer.step(x, y)
    trainer.save(folder, wait=True)
    with patch.object(tensorfile, "read", late):
        trainer.resume(folder)
    for x, y in batches[6:]:
        trainer.step(x, y)
    return [float(loss) for loss in trainer.flush()]


def stopped() -> str:
    """What a process is told that goes on after an error."""
    _, batches = job_of("dropout")
    guards = offbeat.Guards(nonfinite="stop")
    trainer = fresh("dropout", StaleWeights(), stages=2, timeout=20, guards=guards)
    with contextlib.suppress(OffbeatError):
        for x, y in batches:
            trainer.step(x * float("nan"), y)
    try:
        trainer.step(*batches[0])
    except StoppedError as error:
        return str(error)
    return "nothing"


def names_in(folder: Path) -> list[str]:
    """What lies in a folder of checkpoints, but for the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
