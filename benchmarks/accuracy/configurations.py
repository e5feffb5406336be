"""What is compared: ways to train, and sets of runs that answer a question each.

Nothing is tuned for any way: all share the recipe of their network, that of plain training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offbeat.corrections import (
    ClipPerStage,
    Correction,
    DelayCompensation,
    Extrapolate,
    GapAware,
    LookAhead,
    MomentumByLag,
    Predict,
    RateByLag,
    Rewind,
    Shrink,
    SpikeCompensation,
)
from offbeat.methods import (
    ADL,
    DDG,
    DGL,
    FDG,
    FeaturesReplay,
    Method,
    Phases,
    PipeDream,
    StaleWeights,
    Synchronous,
)

BASELINE = "BP"
TAIL = 0.1
"""The share of a run that a synchronous tail takes."""


@dataclass(frozen=True)
class Way:
    """A method for a run of so many updates, and its corrections."""

    method: Callable[[int], Method]
    corrections: Sequence[Correction] = ()
    slow_statistics: bool = False
    """BatchNorm's running statistics move as far per batch, not per micro-batch, as in BP."""


def _always(method: Method, *corrections: Correction) -> Way:
    return Way(lambda _: method, corrections)


def _then_synchronous(method: Method, *corrections: Correction, share: float = TAIL) -> Way:
    return Way(
        lambda updates: Phases((method, updates - int(share * updates)), (Synchronous(), None)),
        corrections,
    )


ORDERS_AND_RULES = {
    "stale, current": _always(StaleWeights()),
    "stale, stash": _always(StaleWeights(backward="stash")),
    "stale, recompute": _always(StaleWeights(backward="recompute")),
    "1F1B, current": _always(PipeDream(backward="current")),
    "1F1B, stash": _always(PipeDream()),
}
ACCUMULATION = {
    **{f"stale, M={m}": _always(ADL(accumulate=m)) for m in (2, 4, 8)},
    **{f"1F1B, M={m}": _always(PipeDream(accumulate=m)) for m in (2, 4, 8)},
}
CORRECTED = {
    "1F1B + predict geometric": _always(PipeDream(), Predict(horizon="geometric")),
    "1F1B + predict lag": _always(PipeDream(), Predict(horizon="lag")),
    "1F1B + predict fitted": _always(PipeDream(), Predict(horizon="fitted")),
    "1F1B + predict difference": _always(PipeDream(), Predict(direction="difference")),
    "1F1B + spike": _always(PipeDream(), SpikeCompensation()),
    "1F1B + predict + spike": _always(PipeDream(), Predict(), SpikeCompensation()),
    "1F1B + look-ahead": _always(PipeDream(), LookAhead()),
    "1F1B + extrapolate": _always(PipeDream(), Extrapolate()),
    "1F1B + delay compensation": _always(PipeDream(), DelayCompensation()),
    "1F1B + gap-aware": _always(PipeDream(), GapAware()),
    "1F1B + shrink": _always(PipeDream(), Shrink(beta=0.5)),
    "1F1B + clip": _always(PipeDream(), ClipPerStage(times=2)),
    "1F1B + rate by lag": _always(PipeDream(), RateByLag()),
    "1F1B + momentum by lag": _always(PipeDream(), MomentumByLag()),
    "PipeMare": _always(StaleWeights(), RateByLag(plus=0, anneal=1000), Rewind()),
}
COMBINED = {
    "1F1B, M=2 + spike": _always(PipeDream(accumulate=2), SpikeCompensation()),
    "1F1B, M=4 + spike": _always(PipeDream(accumulate=4), SpikeCompensation()),
    "1F1B, M=8 + spike": _always(PipeDream(accumulate=8), SpikeCompensation()),
    "1F1B, M=4 + predict": _always(PipeDream(accumulate=4), Predict()),
    "1F1B, M=4 + rate by lag": _always(PipeDream(accumulate=4), RateByLag()),
}
SYNCHRONOUS_END = {
    "stale, tail": _then_synchronous(StaleWeights()),
    "stale, half": _then_synchronous(StaleWeights(), share=0.5),
    "1F1B, tail": _then_synchronous(PipeDream()),
    "1F1B, M=4, tail": _then_synchronous(PipeDream(accumulate=4)),
    "1F1B, M=4 + spike, tail": _then_synchronous(PipeDream(accumulate=4), SpikeCompensation()),
}
# What micro-batches do by themselves: BatchNorm sees fewer rows at a time.
MICRO_BATCHES = {f"BP, M={m}": _always(ADL(accumulate=m, cap=0)) for m in (4, 8)}
SLOW_STATISTICS = {
    f"{name}, slow statistics": replace(way, slow_statistics=True)
    for name, way in (MICRO_BATCHES | COMBINED).items()
    if name.startswith("BP") or name.endswith(("M=4 + spike", "M=8 + spike"))
}
OF_THE_TABLE = {
    "DDG": _always(DDG()),
    "Features Replay": _always(FeaturesReplay()),
    "FDG": _always(FDG()),
    "FDG, shrink 0.5": _always(FDG(beta=0.5)),
    "ADL, M=2": _always(ADL(accumulate=2)),
    "ADL, M=4": _always(ADL(accumulate=4)),
    "DGL": _always(DGL()),
}

WAYS: dict[str, Way] = {
    BASELINE: _always(Synchronous()),
    **ORDERS_AND_RULES,
    **ACCUMULATION,
    **CORRECTED,
    **COMBINED,
    **SYNCHRONOUS_END,
    **MICRO_BATCHES,
    **SLOW_STATISTICS,
    **OF_THE_TABLE,
}
ALONE = {"DGL"}
"""Ways that add layers of their own, which an ensemble would mix."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained, by every way alike."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch: int = 128


RECIPES = {
    "alexnet": Recipe(lr=0.02),
    "vgg16": Recipe(lr=0.05),
    "lenet5": Recipe(lr=0.01),
}
"""Where it is not the ResNets'."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where stages begin: so many, at these children, or behind these weighted layers."""

    stages: int | None = None
    cuts: tuple[int, ...] | None = None
    ppv: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.stages is not None:
            return f"{self.stages} stages"
        return f"cuts {self.cuts}" if self.ppv is None else f"ppv {self.ppv}"


@dataclass(frozen=True, kw_only=True)
class Set:
    """Runs that answer a question; BP of the same network and seeds belongs to every one."""

    question: str
    network: str
    cuts: Sequence[Cut]
    ways: Sequence[str]
    seeds: Sequence[Sequence[int]]
    """In groups, each of which is trained as one."""
    rates: Sequence[float] = (1.0,)
    """Factors on the recipe's learning rate, for BP as for all."""
    epochs: int = 10

    @cached_property
    def count(self) -> int:
        return sum(map(len, self.seeds))


_FIVE = (tuple(range(5)),)
_SINGLY = tuple((seed,) for seed in range(5))
_WHOLE_GRID = [
    *ORDERS_AND_RULES,
    *ACCUMULATION,
    *CORRECTED,
    *COMBINED,
    *SYNCHRONOUS_END,
    *MICRO_BATCHES,
]

SETS = {
    "eight": Set(
        question="Eight stages: what does staleness cost, and what gives it back?",
        network="resnet-20",
        cuts=[Cut(stages=8)],
        ways=_WHOLE_GRID,
        seeds=_FIVE,
    ),
    "bound": Set(
        question="Eight stages, the best of them, with enough seeds to bound the gap",
        network="resnet-20",
        cuts=[Cut(stages=8)],
        ways=["1F1B, M=8", "1F1B, M=8 + spike", "1F1B, M=4 + spike", "BP, M=8"],
        seeds=[tuple(range(8 * n, 8 * n + 8)) for n in range(1, 5)],
    ),
    "four": Set(
        question="Four stages",
        network="resnet-20",
        cuts=[Cut(stages=4)],
        ways=[
            "stale, current", "stale, stash", "1F1B, current", "1F1B, stash", "1F1B, M=2",
            "1F1B, M=4", "1F1B, M=8", *CORRECTED, "1F1B, M=2 + spike", "1F1B, M=4 + spike",
            "stale, tail", "stale, half", "1F1B, tail",
        ],
        seeds=_FIVE,
    ),
    "twenty": Set(
        question="Twenty stages",
        network="resnet-56",
        cuts=[Cut(stages=20)],
        ways=["1F1B, M=8 + spike", "1F1B, stash", "1F1B + spike"],
        seeds=_FIVE,
    ),
    "twenty-bound": Set(
        question="Twenty stages, the best of them, with more seeds",
        network="resnet-56",
        cuts=[Cut(stages=20)],
        ways=["1F1B, M=8 + spike"],
        seeds=[tuple(range(5, 10))],
    ),
    "twenty-briefly": Set(
        question="Twenty stages, half as long",
        network="resnet-56",
        cuts=[Cut(stages=20)],
        ways=[
            "stale, current", "stale, stash", "1F1B, stash", "1F1B, M=2", "1F1B, M=4", "1F1B, M=8",
            *CORRECTED, "1F1B, M=4 + spike", "1F1B, M=8 + spike", "stale, half", "1F1B, tail",
            "BP, M=8",
        ],
        seeds=_FIVE,
        epochs=5,
    ),
    "rates": Set(
        question="At other learning rates, for all alike",
        network="resnet-20",
        cuts=[Cut(stages=8)],
        ways=["stale, current", "1F1B, stash", "1F1B, M=4 + spike", "1F1B, M=8"],
        seeds=_FIVE,
        rates=(0.5, 2.0),
        epochs=5,
    ),
    "statistics": Set(
        question="BatchNorm's running statistics at the pace of whole batches",
        network="resnet-20",
        cuts=[Cut(stages=8)],
        ways=list(SLOW_STATISTICS),
        seeds=[tuple(range(5)), tuple(range(8, 16))],
    ),
    "registers": Set(
        question="Accuracy against the share of weights that are stale",
        network="resnet-20",
        cuts=[Cut(ppv=(layer,)) for layer in (3, 7, 13, 17, 19)],
        ways=["stale, current", "stale, half"],
        seeds=_FIVE,
        epochs=5,
    ),
    "table": Set(
        question="ResNet-56 in two, three and four modules, beside the published table",
        network="resnet-56",
        # Blocks of its groups begin at children 3, 12 and 21.
        cuts=[Cut(cuts=(16,)), Cut(cuts=(12, 21)), Cut(cuts=(9, 16, 23))],
        ways=list(OF_THE_TABLE),
        seeds=(tuple(range(3)),),
        epochs=5,
    ),
    "resnet-20": Set(
        question="The paper's ResNet-20: a register behind layer 7",
        network="resnet-20",
        cuts=[Cut(ppv=(7,))],
        ways=["stale, current", "1F1B, stash", "1F1B, M=2", "1F1B + spike", "1F1B, M=2 + spike"],
        seeds=_FIVE,
    ),
    "alexnet": Set(
        question="The paper's AlexNet: a register behind layer 3",
        network="alexnet",
        cuts=[Cut(ppv=(3,))],
        ways=["stale, current", "1F1B + spike", "1F1B, M=2 + spike"],
        seeds=_SINGLY,
    ),
    "vgg-16": Set(
        question="The paper's VGG-16: a register behind layer 2",
        network="vgg16",
        cuts=[Cut(ppv=(2,))],
        ways=["stale, current", "1F1B + spike", "1F1B, M=2 + spike"],
        seeds=_SINGLY,
        epochs=20,
    ),
    "lenet-5": Set(
        question="The paper's LeNet-5 (MNIST): a register behind layer 2",
        network="lenet5",
        cuts=[Cut(ppv=(2,))],
        ways=["stale, current", "1F1B, stash", "1F1B, M=2", "1F1B + spike", "1F1B, M=2 + spike"],
        seeds=_SINGLY,
    ),
}  # fmt: skip
