"""What is compared: ways to train, optimizers with three learning rates each, and sets of runs.

Every way of a set is compared with BP of the same optimizer, seed and batches at BP's best rate.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch
from benchmarks.language.ensemble import StackedMuon
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from offbeat.corrections import (
    ClipPerStage,
    Correction,
    Extrapolate,
    LookAhead,
    MomentumByLag,
    Predict,
    RateByLag,
    SpikeCompensation,
)
from offbeat.methods import DSP, Method, PipeDream, StaleWeights, Synchronous

STAGES = 8
"""And as many transformer blocks."""
BASELINE = "BP"
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Way:
    method: Method
    stages: int
    corrections: tuple[Correction, ...]
    extrapolated: bool = False
    """The optimizer's own steps, whatever the lag."""

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
        f"{order} + clip": _always(method, ClipPerStage(times=2)),
        f"{order} + rate by lag": _always(method, RateByLag()),
        f"{order} + momentum by lag": _always(method, MomentumByLag()),
        f"{order} + look-ahead": _always(method, LookAhead()),
        f"{order} + momentum by lag, look-ahead": _always(method, MomentumByLag(), LookAhead()),
        f"{order} + spike": _always(method, SpikeCompensation()),
    }


def delayed(updates: int) -> str:
    return f"delay {updates}"


DELAYS = (1, 2, 4, 8, 14)

WAYS: dict[str, Way] = {
    # One stage gives the bits of eight without lag, and takes the CPU an eighth of the work.
    BASELINE: _always(Synchronous(), stages=1),
    # Extrapolating is also a look-ahead, from which BP may gain by itself.
    "BP + extrapolate": Way(Synchronous(), 1, (), extrapolated=True),
    # lag at most 1: the batch in as many parts as there are stages
    "1F1B, M=8": _always(PipeDream(accumulate=8)),
    "1F1B, M=8 + extrapolate": _always(PipeDream(accumulate=8), Extrapolate()),
    "1F1B, M=8 + extrapolate, gain 0.5": _always(PipeDream(accumulate=8), Extrapolate(gain=0.5)),
    "1F1B, M=8 + predict T=1": _always(PipeDream(accumulate=8), Predict(horizon=1.0)),
    # the same with fewer of the parts late: 7 of 32 at the first stage where it was 7 of 8
    "1F1B, M=16 + extrapolate": _always(PipeDream(accumulate=16), Extrapolate()),
    "1F1B, M=32": _always(PipeDream(accumulate=32)),
    "1F1B, M=32 + extrapolate": _always(PipeDream(accumulate=32), Extrapolate()),
    "1F1B, M=32 + extrapolate, gain 0.25": _always(
        PipeDream(accumulate=32), Extrapolate(gain=0.25)
    ),
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
    **{delayed(d): _always(DSP(lag=(d,), backward="stash"), stages=1) for d in DELAYS},
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
    own = lr.clone() if isinstance(lr, Tensor) else lr
    return [
        StackedMuon(matrices, lr, momentum=0.95, decay=WEIGHT_DECAY),
        _adamw_of(others, own, 0.9, recorded),
    ]


OPTIMIZERS: dict[str, Recipe] = {
    "sgd": Recipe((0.1, 0.2, 0.4), _sgd),
    "adamw": Recipe((2e-3, 4e-3, 8e-3), _adamw(0.9)),
    "adamw .99": Recipe((5e-4, 1e-3, 2e-3), _adamw(0.99)),
    "nadamw .99": Recipe((5e-4, 1e-3, 2e-3), _nadamw),
    "muon": Recipe((2e-3, 4e-3, 8e-3), _muon),
}


def extrapolating(optimizer: Optimizer) -> None:
    """``w + u[t] + (u[t] - u[t-1])``, u being its steps: what Extrapolate does at a lag of 1."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    before = [torch.empty_like(p).detach() for p in weights]
    previous: list[Tensor] = []

    @torch.no_grad()
    def remember(*_: object) -> None:
        torch._foreach_copy_(before, weights)

    @torch.no_grad()
    def go_on(*_: object) -> None:
        step = torch._foreach_sub(weights, before)
        if not previous:
            previous.extend(step)
            return
        torch._foreach_add_(weights, torch._foreach_sub(step, previous))
        torch._foreach_copy_(previous, step)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(go_on)


def optimizer_factory(
    name: str, lr: float, model: nn.Sequential, *, recorded: bool, extrapolated: bool
) -> Callable[[list[nn.Parameter]], Made]:
    """For the weights of a stage. A rate that recordings read is a tensor on the device."""
    # The matrices of the blocks, in stacks.
    hidden = {id(p) for p in model[1:-2].parameters() if p.ndim == 3}

    def factory(weights: list[nn.Parameter]) -> Made:
        matrices = [p for p in weights if id(p) in hidden]
        others = [p for p in weights if id(p) not in hidden]
        rate = torch.tensor(lr, device=weights[0].device) if recorded else lr
        made = OPTIMIZERS[name].make(matrices, others, rate, recorded)
        if extrapolated:
            for optimizer in made if isinstance(made, list) else [made]:
                extrapolating(optimizer)
        return made

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
    rates: tuple[float, ...] = (1.0,)
    """Of BP's best learning rate. Whatever lags is tried with smaller ones as well."""


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
    TUNE: Set("Which of three learning rates does BP want?", _each([BASELINE], OPTIMIZERS), 3),
    "target": Set(
        "Lag at most 1 by accumulation: at most 0.005 nats behind BP?",
        _each(
            [
                BASELINE,
                "BP + extrapolate",
                "1F1B, M=8",
                "1F1B, M=8 + extrapolate",
                "1F1B, M=16 + extrapolate",
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
        rates=(1.0, 0.25),
    ),
    "curve": Set(
        "One delay for all weights: which optimizer stands how much?",
        _each([BASELINE, *map(delayed, DELAYS)], OPTIMIZERS),
        3,
        rates=(1.0, 0.5, 0.25),
    ),
    "between": Set(
        "Less accumulation, and extrapolation by less than a whole update.",
        _each(
            [
                BASELINE,
                "1F1B, M=4",
                "1F1B, M=2",
                "1F1B, M=8 + extrapolate, gain 0.5",
                "1F1B, M=32 + extrapolate, gain 0.25",
                "1F1B, M=8 + predict T=1",
            ],
            ["adamw", "muon"],
        ),
        3,
    ),
}
