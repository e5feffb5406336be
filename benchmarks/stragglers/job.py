"""What every process runs: trainers one after the other, one per method and slow-down."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from benchmarks.sleeping import slept
from torch import Tensor, nn

import offbeat
from offbeat.faults import Faults
from offbeat.methods import Method
from offbeat.records.ledger import Ledger

Compute = Literal["sleep", "real"]
CLASSES = 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one stage does to a batch."""

    compute: Compute
    rows: int
    width: int
    layers: int
    """Real compute: linear layers per stage."""
    forward_s: float
    """Sleeping: what a forward of a whole batch takes; the backward takes twice that."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One trainer: a method, a slow-down, and the steps that are timed."""

    name: str
    method: Method
    by: float
    probability: float
    seed: int
    first: int
    steps: int

    @property
    def faults(self) -> Faults:
        return Faults().slow(by=self.by, probability=self.probability, seed=self.seed)


class Sleeping(nn.Module):
    """A small linear layer that takes as long as it is told, in proportion to its rows."""

    def __init__(self, width: int, seconds_per_row: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._seconds_per_row = seconds_per_row

    def forward(self, x: Tensor) -> Tensor:
        # The linear layer comes first: through its weights the sleep always has a backward.
        return slept(self.linear(x), self._seconds_per_row * len(x))


def stage_of(work: Work) -> nn.Module:
    if work.compute == "sleep":
        return Sleeping(work.width, work.forward_s / work.rows)
    layers: list[nn.Module] = []
    for _ in range(work.layers):
        layers += [nn.Linear(work.width, work.width), nn.Tanh()]
    return nn.Sequential(*layers)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[:, :CLASSES], target)


def time_all(stages: int, work: Work, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Times every run, in this process together with its neighbours."""
    _import_all()
    found = []
    for number, run in enumerate(runs, 1):
        rank, measured = time_run(stages, work, run)
        gc.collect()  # the trainer's threads end with it
        gc.freeze()  # and the next collection need not look at all of torch again
        found.append(measured)
        if rank == 0:
            print(
                f"seed {run.seed}  {number:2}/{len(runs)}  {run.name:12} slowed by {run.by:4.0%}"
                f"  {1000 * measured['step_s']:8.2f} ms a step",
                flush=True,
            )
    return found


def _import_all() -> None:
    """Trains a step alone, because some of torch is only imported when it is used."""
    trainer = offbeat.Trainer(
        [nn.Linear(2, 2)],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        engine="serial",
    )
    trainer.step(torch.ones(2, 2), torch.ones(2, 2))


def time_run(stages: int, work: Work, run: Run) -> tuple[int, dict[str, Any]]:
    """Mean seconds per step, and without faults also what single actions take."""
    torch.manual_seed(0)
    trainer = offbeat.Trainer(
        [stage_of(work) for _ in range(stages)],
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        method=run.method,
        faults=run.faults,
        timeout=60.0,
    )
    # The first stage's input asks for its gradient too, so that all stages do equal work.
    x = torch.randn(work.rows, work.width).requires_grad_()
    y = torch.randint(CLASSES, (work.rows,))
    ends = []
    for _ in range(run.first + run.steps):
        trainer.step(x, y)
        ends.append(time.perf_counter())
    trainer.flush()
    measured = {"step_s": (ends[-1] - ends[run.first - 1]) / run.steps}
    actions = {} if run.by else _action_times(trainer.ledger, stages)
    return trainer.rank, measured | actions


def _action_times(ledger: Ledger, stages: int) -> dict[str, Any]:
    """Median seconds of a forward and of a backward (with what it computes again), by stage."""
    entries = list(ledger)
    return {
        name: [
            median(e.end_s - e.start_s for e in entries if (e.kind, e.stage) == (kind, stage))
            for stage in range(stages)
        ]
        for name, kind in (("forward_s", "F"), ("backward_s", "B"))
    }
