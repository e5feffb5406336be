"""What is compared: ways to train, optimizers with three learning rates each, and sets of runs.

Every way of a set is compared with BP of the same optimizer, learning rate, seed and batches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from offbeat.corrections import (
    Correction,
    Extrapolate,
    LookAhead,
    MomentumByLag,
    Predict,
    RateByLag,
    SpikeCompensation,
)
from offbeat.methods import DSP, Method, PipeDream, StaleWeights, Synchronous
from offbeat.optimizers import Muon

STAGES = 8
"""And as many transformer blocks."""
BASELINE = "BP"
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Way:
    method: Method
    stages: int
    corrections: tuple[Correction, ...]

    @property
    def lags(self) -> tuple[int, ...]:
        return self.method.lags(self.stages)

    @property
    def micro_batches(self) -> int:
        return self.method.schedule(self.stages).micro_batches


def _always(method: Method, *corrections: Correction, stages: int = STAGES) -> Way:
    return Way(method, stages, corrections)


def _with_each_correction(order: str, method: Method) -> dict[str, Way]:
    """Each alone on top of stashed weights: exact gradients that are late and nothing else."""
    return {
        f"{order} + predict geometric": _always(method, Predict(horizon="geometric")),
        f"{order} + predict fitted": _always(method, Predict(horizon="fitted")),
        f"{order} + extrapolate": _always(method, Extrapolate()),
        f"{order} + rate by lag": _always(method, RateByLag()),
        f"{order} + momentum by lag": _always(method, MomentumByLag()),
        f"{order} + look-ahead": _always(method, LookAhead()),
        f"{order} + momentum by lag, look-ahead": _always(method, MomentumByLag(), LookAhead()),
        f"{order} + spike": _always(method, SpikeCompensation()),
    }


def delayed(updates: int) -> str:
    return f"delay {updates}"


DELAYS = (1, 2, 4, 8)
FAR_DELAY = 14

WAYS: dict[str, Way] = {
    # One stage gives the bits of eight without lag, and takes the CPU an eighth of the work.
    BASELINE: _always(Synchronous(), stages=1),
    # lag at most 1: the batch in as many parts as there are stages
    "1F1B, M=8": _always(PipeDream(accumulate=8)),
    "1F1B, M=8 + extrapolate": _always(PipeDream(accumulate=8), Extrapolate()),
    "1F1B, M=8 + extrapolate, gain 0.5": _always(PipeDream(accumulate=8), Extrapolate(gain=0.5)),
    "1F1B, M=8 + predict T=1": _always(PipeDream(accumulate=8), Predict(horizon=1.0)),
    # the same with fewer of the parts late: 7 of 32 at the first stage where it was 7 of 8
    "1F1B, M=32": _always(PipeDream(accumulate=32)),
    "1F1B, M=32 + extrapolate": _always(PipeDream(accumulate=32), Extrapolate()),
    "1F1B, M=4": _always(PipeDream(accumulate=4)),
    "1F1B, M=2": _always(PipeDream(accumulate=2)),
    # lag up to 7
    "1F1B, current": _always(PipeDream(backward="current")),
    "1F1B, stash": _always(PipeDream()),
    **_with_each_correction("1F1B", PipeDream()),
    # lag up to 14
    "stale, current": _always(StaleWeights()),
    "stale, stash": _always(StaleWeights(backward="stash")),
    **_with_each_correction("stale", StaleWeights(backward="stash")),
    # the same lag for all weights: one stage that waits
    **{
        delayed(d): _always(DSP(lag=(d,), backward="stash"), stages=1)
        for d in (*DELAYS, FAR_DELAY)
    },
}  # fmt: skip


# ------------------------------------------------------------------------- optimizers

Made = Optimizer | list[Optimizer]


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is made, and the learning rates it is tuned over."""

    rates: tuple[float, float, float]
    make: Callable[[list[nn.Parameter], list[nn.Parameter], float | Tensor, bool], Made]
    """From hidden matrices, other weights, a rate, and whether a CUDA graph will record it."""


def _sgd(
    matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float | Tensor, recorded: bool
) -> Made:
    fused = True if recorded else None
    return SGD(matrices + others, lr=lr, momentum=0.9, fused=fused)


def _adamw(beta1: float) -> Callable[..., Made]:
    def make(
        matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float | Tensor, recorded: bool
    ) -> Made:
        return _adamw_of(matrices + others, lr, beta1, recorded)

    return make


def _adamw_of(
    weights: list[nn.Parameter], lr: float | Tensor, beta1: float, recorded: bool
) -> AdamW:
    betas = (beta1, 0.95)
    # Unrecorded steps on a GPU are fused: one launch where there would be ten.
    fused = True if not recorded and weights[0].is_cuda else None
    return AdamW(
        weights, lr=lr, betas=betas, weight_decay=WEIGHT_DECAY, capturable=recorded, fused=fused
    )


def _nadamw(
    matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float | Tensor, recorded: bool
) -> Made:
    return NAdam(
        matrices + others,
        lr=lr,
        betas=(0.99, 0.95),
        momentum_decay=0.2,  # 0.004, the default, is for runs fifty times as long
        weight_decay=WEIGHT_DECAY,
        decoupled_weight_decay=True,
        capturable=recorded,
    )


def _muon(
    matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float | Tensor, recorded: bool
) -> Made:
    """AdamW for embeddings, head, norms and biases; steps as long as AdamW's, so one rate fits."""
    settings: dict[str, Any] = {
        "weight_decay": WEIGHT_DECAY,
        "momentum": 0.95,
        "adjust_lr_fn": "match_rms_adamw",
    }
    own = lr.clone() if isinstance(lr, Tensor) else lr
    return [Muon(matrices, lr=lr, **settings), _adamw_of(others, own, 0.9, recorded)]


OPTIMIZERS: dict[str, Recipe] = {
    "sgd": Recipe((0.1, 0.2, 0.4), _sgd),
    "adamw": Recipe((1e-3, 2e-3, 4e-3), _adamw(0.9)),
    "adamw .99": Recipe((5e-4, 1e-3, 2e-3), _adamw(0.99)),
    "nadamw .99": Recipe((5e-4, 1e-3, 2e-3), _nadamw),
    "muon": Recipe((2e-3, 4e-3, 8e-3), _muon),
}


def optimizer_factory(
    name: str, lr: float, model: nn.Sequential, *, recorded: bool
) -> Callable[[list[nn.Parameter]], Made]:
    """For the weights of a stage. A rate that recordings read is a tensor on the device."""
    hidden = {id(p) for p in model[1:-2].parameters() if p.ndim == 2}  # those of the blocks

    def factory(weights: list[nn.Parameter]) -> Made:
        matrices = [p for p in weights if id(p) in hidden]
        others = [p for p in weights if id(p) not in hidden]
        rate = torch.tensor(lr, device=weights[0].device) if recorded else lr
        return OPTIMIZERS[name].make(matrices, others, rate, recorded)

    return factory


# ------------------------------------------------------------------------- sets


@dataclass(frozen=True)
class Comparison:
    way: str
    optimizer: str


@dataclass(frozen=True)
class Set:
    question: str
    comparisons: tuple[Comparison, ...]
    seeds: int


def _each(ways: Iterable[str], optimizers: Iterable[str]) -> tuple[Comparison, ...]:
    return tuple(Comparison(way, optimizer) for optimizer, way in product(optimizers, ways))


_EVERY_UPDATE = [
    name
    for name, way in WAYS.items()
    if way.stages == STAGES and way.micro_batches == 1
]  # fmt: skip
# Muon looks ahead by itself, and spike compensation is not for it. A higher momentum needs one.
_FOR_MUON = [name for name in _EVERY_UPDATE if not name.endswith(("look-ahead", "spike"))]
_FOR_ADAMW = [name for name in _EVERY_UPDATE if not name.endswith("momentum by lag")]

TUNE = "tune"
SETS: dict[str, Set] = {
    TUNE: Set("Which of three learning rates does BP want?", _each([BASELINE], OPTIMIZERS), 1),
    "target": Set(
        "Lag at most 1 by accumulation: at most 0.005 nats behind BP?",
        _each(
            [
                BASELINE,
                "1F1B, M=8",
                "1F1B, M=8 + extrapolate",
                "1F1B, M=32",
                "1F1B, M=32 + extrapolate",
            ],
            ["adamw", "muon"],
        ),
        5,
    ),
    "lag": Set(
        "An update per batch, lag up to 7 and 14: what helps?",
        _each([BASELINE, *_FOR_ADAMW], ["adamw"])
        + _each([BASELINE, *_FOR_MUON], ["muon"])
        + _each([BASELINE, "1F1B, stash", "stale, stash"], ["nadamw .99"]),
        3,
    ),
    "curve": Set(
        "One delay for all weights: which optimizer stands how much?",
        _each([BASELINE, *map(delayed, DELAYS)], OPTIMIZERS),
        3,
    ),
    "far": Set("The curve at a delay of 14.", _each([BASELINE, delayed(FAR_DELAY)], OPTIMIZERS), 2),
    "between": Set(
        "Less accumulation, and extrapolation by half.",
        _each(
            [
                BASELINE,
                "1F1B, M=4",
                "1F1B, M=2",
                "1F1B, M=8 + extrapolate, gain 0.5",
                "1F1B, M=8 + predict T=1",
            ],
            ["adamw", "muon"],
        ),
        3,
    ),
}


def guessed_ms(way: str, optimizer: str, parallel: int) -> float:
    """Milliseconds per update of one run among many on a GPU: guesses, to plan by."""
    chosen = WAYS[way]
    gpu = 1.6 + 0.35 * (chosen.micro_batches - 1) + (0.3 if optimizer == "muon" else 0.0)
    cpu = 0.4 * chosen.stages + 5.0 * (chosen.micro_batches - 1)
    if chosen.corrections:
        cpu += 13.0 if optimizer == "muon" else 6.0
    return max(cpu, parallel * gpu)
