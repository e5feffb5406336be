"""One run: small GPTs over bytes, a seed each, trained one way with one optimizer as one."""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from benchmarks.jobs import Asked, share_of_rate
from benchmarks.language.configurations import STAGES, WAYS, optimizer_factory
from benchmarks.language.data import VOCABULARY, Batch, Text
from benchmarks.language.ensemble import ensemble, losses_of, summed_loss
from benchmarks.pool import cleared_up, memory_gib
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.zoo import gpt

Precision = Literal["bf16", "tf32", "fp32"]
EVALUATIONS = 4
VALIDATION = {"batches": 16, "rows": 64}
LOOKS_EVERY = 25
"""Updates between two looks at the clock."""


@dataclass(frozen=True, kw_only=True)
class Job(Asked):
    own = ("way", "optimizer", "lr", "seeds")

    way: str
    optimizer: str
    lr: float
    seeds: tuple[int, ...]
    updates: int
    rows: int
    context: int
    width: int
    precision: Precision
    text: str = "enwik8"
    dropout: float = 0.0


def trainer_of(job: Job, device: torch.device, engine: Any = None) -> offbeat.Trainer:
    way = WAYS[job.way]
    engine = engine or ("streams" if device.type == "cuda" else "serial")
    make = partial(gpt, VOCABULARY, job.context, STAGES, job.width, heads=4, dropout=job.dropout)
    model = ensemble(make, job.seeds).to(device)
    recorded = engine == "streams"
    return offbeat.Trainer(
        model,
        loss=summed_loss,
        optimizer=optimizer_factory(
            job.optimizer, job.lr, model, recorded=recorded, extrapolated=way.extrapolated
        ),
        scheduler=lambda made: LambdaLR(made, lambda n: share_of_rate(n, job.updates)),
        method=way.method,
        corrections=way.corrections,
        # One block per stage; the first has the embedding too, the last the head.
        **({"stages": 1} if way.stages == 1 else {"cuts": range(2, way.stages + 1)}),
        seed=job.seeds[0],
        autocast=torch.bfloat16 if job.precision == "bf16" else None,
        engine=engine,
    )


def train(job: Job, text: Text, device: torch.device, until: float) -> dict[str, Any] | None:
    """What a run found; None if it could not end in time."""
    return cleared_up(lambda: _train(job, text, device, until), device)


def _train(job: Job, text: Text, device: torch.device, until: float) -> dict[str, Any] | None:
    torch.set_float32_matmul_precision("highest" if job.precision == "fp32" else "high")
    trainer = trainer_of(job, device)
    count = len(job.seeds)
    validation = text.validation(**VALIDATION, context=job.context, networks=count)
    seeds = [1000 + seed for seed in job.seeds]
    batches = text.batches(updates=job.updates, rows=job.rows, context=job.context, seeds=seeds)
    start, curve, passed = time.monotonic(), [], [(0, 0.0)]
    ends = {-(-job.updates * part // EVALUATIONS) for part in range(1, EVALUATIONS + 1)}
    for update, (x, y) in enumerate(batches, start=1):
        trainer.step(x, y)
        if update == job.updates:
            trainer.flush()
        if update in ends:
            loss = trainer.evaluate(validation).loss / count
            passed.append((update, time.monotonic() - start))
            curve.append([update, _rounded(loss)])
        if update % LOOKS_EVERY == 0 and update < job.updates and time.monotonic() > until:
            return None
    return {
        "losses": evaluated(trainer.model, validation, job, device),
        "curve": curve,
        "lags": list(trainer.lags),
        "stages": trainer.stages,
        "seconds": round(passed[-1][1], 2),
        "ms_per_update": round(_milliseconds(passed), 3),
        "memory_gib": memory_gib(device),
    }


@torch.no_grad()
def evaluated(
    model: nn.Module, validation: list[Batch], job: Job, device: torch.device
) -> list[float | None]:
    """The loss of every network; None where it is no number."""
    total = torch.zeros(len(job.seeds), device=device)
    model.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
        for x, y in validation:
            total += losses_of(model(x), y)
    return [_rounded(loss) for loss in (total / len(validation)).tolist()]


def _rounded(loss: float) -> float | None:
    return round(loss, 6) if math.isfinite(loss) else None


def _milliseconds(passed: list[tuple[int, float]]) -> float:
    """Per update of the second half: the first has the recording in it."""
    (first, start), (last, end) = passed[(len(passed) - 1) // 2], passed[-1]
    return 1e3 * (end - start) / (last - first)
