"""One run: a small GPT over bytes, trained one way with one optimizer from one seed."""

import json
import math
import time
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from benchmarks.language.configurations import STAGES, WAYS, optimizer_factory
from benchmarks.language.data import VOCABULARY, Text
from benchmarks.pool import cleared_up, memory_gib
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.zoo import gpt

Precision = Literal["bf16", "tf32", "fp32"]
WARM_UP = 0.1
EVALUATIONS = 4
VALIDATION = {"batches": 16, "rows": 64}
LOOKS_EVERY = 25
"""Updates between two looks at the clock."""


@dataclass(frozen=True, kw_only=True)
class Job:
    way: str
    optimizer: str
    lr: float
    seed: int
    updates: int
    rows: int
    context: int
    width: int
    precision: Precision
    text: str = "enwik8"
    dropout: float = 0.0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def setting(self) -> str:
        """What runs must share to be compared at all."""
        own = ("way", "optimizer", "lr", "seed")
        return json.dumps({k: v for k, v in asdict(self).items() if k not in own})


def job_of(row: dict[str, Any]) -> Job:
    return Job(**{field.name: row[field.name] for field in fields(Job) if field.name in row})


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    # In full precision wherever it is called: bfloat16 has three digits, and gaps are in the third.
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def share_of_rate(update: int, updates: int) -> float:
    """Up in a line, then down to nothing in half a cosine."""
    warm_up = max(1, int(WARM_UP * updates))
    if update < warm_up:
        return (update + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (update - warm_up) / max(1, updates - warm_up)))


def trainer_of(job: Job, device: torch.device, engine: Any = None) -> offbeat.Trainer:
    way = WAYS[job.way]
    engine = engine or ("streams" if device.type == "cuda" else "serial")
    torch.manual_seed(job.seed)
    model = gpt(VOCABULARY, job.context, STAGES, job.width, heads=4, dropout=job.dropout).to(device)
    recorded = engine == "streams"
    return offbeat.Trainer(
        model,
        loss=loss_of,
        optimizer=optimizer_factory(job.optimizer, job.lr, model, recorded=recorded),
        scheduler=lambda made: LambdaLR(made, lambda n: share_of_rate(n, job.updates)),
        method=way.method,
        corrections=way.corrections,
        # One block per stage; the first has the embedding too, the last the head.
        **({"stages": 1} if way.stages == 1 else {"cuts": range(2, way.stages + 1)}),
        seed=job.seed,
        autocast=torch.bfloat16 if job.precision == "bf16" else None,
        engine=engine,
    )


def train(job: Job, text: Text, device: torch.device, until: float) -> dict[str, Any] | None:
    """What a run found; None if it could not end in time."""
    return cleared_up(lambda: _train(job, text, device, until), device)


def _train(job: Job, text: Text, device: torch.device, until: float) -> dict[str, Any] | None:
    torch.set_float32_matmul_precision("highest" if job.precision == "fp32" else "high")
    trainer = trainer_of(job, device)
    validation = text.validation(**VALIDATION, context=job.context)
    batches = text.batches(
        updates=job.updates, rows=job.rows, context=job.context, seed=1000 + job.seed
    )
    start, curve, passed = time.monotonic(), [], [(0, 0.0)]
    ends = {-(-job.updates * part // EVALUATIONS) for part in range(1, EVALUATIONS + 1)}
    for update, (x, y) in enumerate(batches, start=1):
        trainer.step(x, y)
        if update == job.updates:
            trainer.flush()
        if update in ends:
            loss = trainer.evaluate(validation).loss
            passed.append((update, time.monotonic() - start))
            curve.append([update, round(loss, 6) if math.isfinite(loss) else None])
            if curve[-1][1] is None:
                break
        if update % LOOKS_EVERY == 0 and update < job.updates and time.monotonic() > until:
            return None
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "lags": list(trainer.lags),
        "stages": trainer.stages,
        "seconds": round(passed[-1][1], 2),
        "ms_per_update": round(_milliseconds(passed), 3),
        "memory_gib": memory_gib(device),
    }


def _milliseconds(passed: list[tuple[int, float]]) -> float:
    """Per update of the second half: the first has the recording in it."""
    (first, start), (last, end) = passed[(len(passed) - 1) // 2], passed[-1]
    return 1e3 * (end - start) / (last - first)
