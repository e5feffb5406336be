"""Corrections against oracles written from their papers; zero lag, identities, engines, words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import correction_oracles as oracle
import jobs
import offbeat
import oracles
from helpers import (
    OPTIMIZERS,
    Factory,
    assert_same_bits,
    cnn,
    image_batches,
    interleave,
    mlp,
    trained,
    trainer_for,
    vector_batches,
)
from offbeat.app.build import corrections_of
from offbeat.app.cli import main
from offbeat.app.cli.train import given_settings
from offbeat.app.experiment import Experiment
from offbeat.app.runs import Run
from offbeat.averaging import AllReduce, DaSGD, LocalSGD
from offbeat.corrections import (
    CORRECTIONS,
    ClipPerStage,
    Correction,
    DelayCompensation,
    Extrapolate,
    GapAware,
    LookAhead,
    Moment,
    MomentumByLag,
    Monitor,
    Predict,
    RateByLag,
    Rewind,
    Shrink,
    SpikeCompensation,
    correction_named,
)
from offbeat.corrections.base import Hook, Surroundings
from offbeat.corrections.groups import Group, groups_of
from offbeat.corrections.predict import Prediction
from offbeat.corrections.read_weights import ReadWeights
from offbeat.corrections.rewind import Rewinding
from offbeat.errors import ConfigurationError
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    FDG,
    RULES,
    GPipe,
    Method,
    Phases,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)
from offbeat.methods.base import Rule
from offbeat.registry import Choice
from offbeat.stages.fill import Fill
from offbeat.stages.stage import Stage

ZERO_LAG = [DSP(lag=(0, 0, 0), backward=rule) for rule in RULES]

SGD, ADAM = oracle.SGD(), oracle.Adam(decay=1e-3)
ADAMW = oracle.Adam(decay=0.1, decoupled=True)
FACTORIES: dict[oracle.Optimizer | str, Factory] = {
    SGD: OPTIMIZERS["momentum"],
    ADAM: lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=1e-3),
    ADAMW: OPTIMIZERS["adamw"],
}


def muon(params: Any) -> torch.optim.Optimizer:
    """Of matrices alone: the networks it is tried on have no biases."""
    return torch.optim.Muon(params, lr=0.02, momentum=0.9, weight_decay=0.1)


def by_lag(D: int) -> float:
    return float(D)


def geometric(D: int) -> float:
    return oracle.geometric(0.9, D)


@dataclass(frozen=True)
class Case:
    corrections: list[Correction]
    optimizer: oracle.Optimizer
    rules: Callable[[], dict[str, Any]]
    """The formulas that differ from the plain optimizer's."""
    methods: tuple[Method, ...] = (PipeDream(), ADL(2))


EVERY_RULE = (PipeDream(), StaleWeights(), DSP(), ADL(2), StaleWeights(accumulate=3))
NO_STASH = (StaleWeights(), DSP(), StaleWeights(accumulate=2))
HALF_STALE = (FDG(), StaleWeights(), ADL(2))

CASES: dict[str, Case] = {
    "predict-velocity": Case(
        [Predict(horizon="lag")], SGD,
        lambda: {"forward": oracle.predicted(SGD, by_lag)}, EVERY_RULE,
    ),
    "predict-geometric": Case(
        [Predict()], SGD, lambda: {"forward": oracle.predicted(SGD, geometric)}, EVERY_RULE,
    ),
    "predict-constant": Case(
        [Predict(horizon=1.5)], SGD,
        lambda: {"forward": oracle.predicted(SGD, lambda D: 1.5 if D else 0.0)},
    ),
    "predict-adam": Case(
        [Predict()], ADAM, lambda: {"forward": oracle.predicted(ADAM, geometric)},
    ),
    "predict-adamw": Case(
        [Predict(horizon="lag")], ADAMW, lambda: {"forward": oracle.predicted(ADAMW, by_lag)},
    ),
    "predict-difference": Case(
        [Predict(direction="difference", horizon="lag")], ADAMW,
        lambda: {"forward": oracle.predicted_by_difference(by_lag)}, EVERY_RULE,
    ),
    "predict-fitted": Case(
        [Predict(horizon="fitted")], SGD, lambda: {"forward": oracle.predicted_by_fit(SGD)},
        HALF_STALE,
    ),
    "predict-fitted-adamw": Case(
        [Predict(horizon="fitted")], ADAMW, lambda: {"forward": oracle.predicted_by_fit(ADAMW)},
    ),
    "spike-sgd": Case([SpikeCompensation()], SGD, lambda: {"step": oracle.spiked(SGD)}, HALF_STALE),
    "spike-adam": Case([SpikeCompensation()], ADAM, lambda: {"step": oracle.spiked(ADAM)}),
    "spike-adamw": Case([SpikeCompensation()], ADAMW, lambda: {"step": oracle.spiked(ADAMW)}),
    "look-ahead-sgd": Case(
        [LookAhead()], SGD, lambda: {"step": oracle.spiked(SGD, 1)}, HALF_STALE
    ),
    "look-ahead-adamw": Case([LookAhead()], ADAMW, lambda: {"step": oracle.spiked(ADAMW, 1)}),
    "extrapolate-sgd": Case(
        [Extrapolate()], SGD, lambda: {"step": oracle.extrapolated(SGD)}, HALF_STALE
    ),
    "extrapolate-adamw": Case(
        [Extrapolate(gain=0.3)], ADAMW, lambda: {"step": oracle.extrapolated(ADAMW, 0.3)}
    ),
    "shrink": Case([Shrink(beta=0.7)], SGD, lambda: {"shrink": 0.7}, HALF_STALE),
    "delay-compensation": Case(
        [DelayCompensation(strength=0.5)], SGD,
        lambda: {"gradient": oracle.compensated(0.5)}, HALF_STALE,
    ),
    "delay-compensation-adaptive": Case(
        [DelayCompensation(strength=0.5, adaptive=True)], ADAMW,
        lambda: {"gradient": oracle.compensated(0.5, adaptive=True)},
    ),
    "gap-aware-sgd": Case(
        [GapAware()], SGD, lambda: {"gradient": oracle.gap_aware(SGD, 0.99)}, HALF_STALE
    ),
    "gap-aware-adamw": Case(
        [GapAware(decay=0.9)], ADAMW, lambda: {"gradient": oracle.gap_aware(ADAMW, 0.9)}
    ),
    "clip-norm": Case(
        [ClipPerStage(norm=0.01)], SGD, lambda: {"gradient": oracle.clipped(0.01)}, EVERY_RULE
    ),
    "clip-times": Case(
        [ClipPerStage(times=1.02)], SGD, lambda: {"gradient": oracle.clipped(times=1.02)}
    ),
    "rate-by-lag": Case(
        [RateByLag()], SGD, lambda: {"step": oracle.rated(SGD, lambda D, t: 1 / (1 + D))},
        EVERY_RULE,
    ),
    "pipemare-rate": Case(
        [RateByLag(plus=0, anneal=9)], ADAMW,
        lambda: {"step": oracle.rated(ADAMW, lambda D, t: max(D, 1) ** -(1 - min(t / 9, 1)))},
        HALF_STALE,
    ),
    "momentum-by-lag": Case(
        [MomentumByLag()], SGD, lambda: {"step": oracle.momentum_by_lag(SGD, 0.99)}, HALF_STALE
    ),
    "momentum-by-lag-down": Case(
        [MomentumByLag(towards=0.3)], ADAMW,
        lambda: {"step": oracle.momentum_by_lag(ADAMW, 0.3)}, HALF_STALE,
    ),
    "rewind": Case([Rewind()], SGD, lambda: {"backward": oracle.rewound(0.135)}, NO_STASH),
    "predict-and-spike": Case(
        [Predict(horizon="lag"), SpikeCompensation()], SGD,
        lambda: {"forward": oracle.predicted(SGD, by_lag), "step": oracle.spiked(SGD)}, EVERY_RULE,
    ),
    "rewind-and-rate": Case(
        [RateByLag(), Rewind(memory_at_lag=0.3)], SGD,
        lambda: {
            "backward": oracle.rewound(0.3),
            "step": oracle.rated(SGD, lambda D, t: 1 / (1 + D)),
        },
        NO_STASH,
    ),
    "predict-and-compensate": Case(
        [Predict(), DelayCompensation(strength=0.5)], SGD,
        lambda: {
            "forward": oracle.predicted(SGD, geometric), "gradient": oracle.compensated(0.5)
        },
    ),
}  # fmt: skip


def compare(case: Case, method: Method, stages: int, seed: int = 0) -> None:
    """Two fills of the pipe, every parameter of every stage."""
    network, inputs, classes = oracles.random_network(seed + stages, stages)
    batches = oracles.random_batches(seed + stages, 13, 7, inputs, classes, last_rows=5)
    compare_on(network, [batches[:8], batches[8:]], case, method, FACTORIES[case.optimizer])


def compare_on(
    network: list[nn.Sequential], segments: Any, case: Case, method: Method, factory: Factory
) -> None:
    stages, loss = len(network), nn.functional.cross_entropy
    assert isinstance(method, offbeat.methods.Asynchronous)
    accumulate = method.micro_batches(stages)
    rules = oracle.Rules(**{"step": oracle.plain(case.optimizer), "rule": method.rule}
                         | case.rules())  # fmt: skip
    depths = list(method.depths(stages))
    expected = oracle.train(network, segments, loss, depths, rules, accumulate)
    trainer = trainer_for(network, method, factory, corrections=case.corrections)
    for segment in segments:
        for x, y in segment:
            trainer.step(x, y)
        trainer.flush()
    for stage, weights in zip(trainer.model.children(), expected, strict=True):
        for ours, theirs in zip(stage.parameters(), weights, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", CASES)
def test_correction_equals_its_oracle(name: str, stages: int) -> None:
    for method in CASES[name].methods:
        compare(CASES[name], method, stages)


def test_every_correction_has_an_oracle() -> None:
    assert {type(c) for case in CASES.values() for c in case.corrections} == set(CORRECTIONS)


@pytest.mark.parametrize("horizon", ["lag", "geometric"])
@pytest.mark.parametrize("stages", [2, 3])
def test_prediction_goes_by_muon_s_last_update(stages: int, horizon: Any) -> None:
    torch.manual_seed(stages)
    widths = [5, 6, 4, 5][: stages + 1]
    network = [
        nn.Sequential(nn.Linear(a, b, bias=False), nn.Tanh()).double() for a, b in pairwise(widths)
    ]
    batches = oracles.random_batches(1, 9, 6, 5, widths[-1], last_rows=6)
    T = by_lag if horizon == "lag" else geometric
    rules = {"forward": oracle.predicted_by_difference(T), "step": oracle.by_torch(muon)}
    case = Case([Predict(horizon=horizon)], SGD, lambda: rules)
    compare_on(network, [batches], case, PipeDream(), muon)


# ------------------------------------------------------------------ the oracles can fail


@pytest.mark.parametrize("name", CASES)
def test_a_correction_that_does_nothing_is_seen(name: str) -> None:
    case = replace(CASES[name], corrections=[])
    with pytest.raises(AssertionError):
        compare(case, case.methods[0], 3)


def seen_red(*names: str) -> None:
    for name in names:
        with pytest.raises(AssertionError):
            compare(CASES[name], CASES[name].methods[0], 3)


def test_a_lag_that_ignores_the_fill_is_seen(monkeypatch: Any) -> None:
    """After a drain the pipe fills anew: its first micro-batches lag less than the stage does."""
    right = Moment.__init__

    def steady(self: Any, lag: int, update: int) -> None:
        right(self, max(lag, 2), update)

    monkeypatch.setattr(Moment, "__init__", steady)
    seen_red("predict-geometric", "spike-sgd", "extrapolate-sgd", "rate-by-lag")


def test_a_prediction_with_the_wrong_sign_is_seen(monkeypatch: Any) -> None:
    right = Prediction.numbers
    monkeypatch.setattr(Prediction, "numbers", lambda *a: [-n for n in right(*a)])
    seen_red("predict-velocity", "predict-adam", "predict-difference")


def test_weight_decay_left_out_of_a_rewritten_step_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(Group, "coupled_decay", 0.0)
    seen_red("spike-sgd", "spike-adam", "gap-aware-sgd")


def test_comparing_with_the_wrong_version_is_seen(monkeypatch: Any) -> None:
    right = ReadWeights.keep
    monkeypatch.setattr(ReadWeights, "keep", lambda self, v, w: right(self, 0, w))
    seen_red("delay-compensation", "gap-aware-sgd")


def test_a_rewound_backward_at_the_newest_weights_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(Rewinding, "backward_weights", lambda self, behind: None)
    seen_red("rewind")


def test_predicted_weights_that_the_stash_forgets_are_seen(monkeypatch: Any) -> None:
    """Under stash the backward must see what its forward saw, under current it must not."""
    right = Stage.begin
    other: dict[Any, Any] = {"stash": "current", "current": "stash"}

    def wrong(self: Stage, fill: Fill) -> None:
        right(self, replace(fill, rule=other.get(fill.rule, fill.rule)))

    monkeypatch.setattr(Stage, "begin", wrong)
    for method in (PipeDream(), StaleWeights()):
        with pytest.raises(AssertionError):
            compare(CASES["predict-velocity"], method, 3)


# ------------------------------------------------------------------ identities

EACH: list[Correction] = [
    Predict(),
    Predict(direction="difference", horizon="fitted"),
    SpikeCompensation(),
    LookAhead(),
    Extrapolate(),
    Shrink(),
    DelayCompensation(),
    GapAware(),
    ClipPerStage(norm=1e-3),
    RateByLag(),
    MomentumByLag(),
]
TOGETHER = [c for c in EACH if c != Predict()]
"""One of each kind, but for rewinding, which wants another rule."""
REWINDING: list[Correction] = [Predict(), Rewind(), RateByLag()]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("method", [Synchronous(), GPipe(2), DGL(), *ZERO_LAG], ids=str)
def test_without_lag_all_corrections_together_change_no_bit(method: Method, optimizer: str) -> None:
    batches = image_batches(4)
    expected = trained(cnn(), batches, method, OPTIMIZERS[optimizer], cuts=[3, 5], seed=1)
    with pytest.warns(UserWarning, match="no stage lags here, so nothing is corrected"):
        ours = trained(
            cnn(), batches, method, OPTIMIZERS[optimizer], cuts=[3, 5], seed=1, corrections=TOGETHER
        )
    assert_same_bits(ours.state_dict(), expected.state_dict())


@pytest.mark.parametrize("correction", [*EACH, Rewind()], ids=lambda c: c.name)
def test_a_stage_without_lag_is_left_alone(correction: Correction) -> None:
    """The last stage has none: it trains as without corrections as long as its inputs do not move.

    A frozen first stage makes sure of that.
    """
    method = StaleWeights(backward="current") if isinstance(correction, Rewind) else PipeDream()

    def factory(params: Any) -> torch.optim.Optimizer:
        first = sum(p.numel() for p in params) == 6 * 8 + 8
        return torch.optim.SGD(params, lr=0.0 if first else 0.1, momentum=0.9)

    results = []
    for corrections in ([], [correction]):
        trainer = trained(mlp(), vector_batches(6), method, factory, cuts=[2],
                          corrections=corrections)  # fmt: skip
        assert not trainer._engine.workers[1].stage.corrector.active
        assert trainer._engine.workers[0].stage.corrector.active == bool(corrections)
        results.append(trainer.state_dict())
    last = {name: value for name, value in results[0].items() if not name.startswith("0.")}
    assert_same_bits({name: results[1][name] for name in last}, last)


@pytest.mark.parametrize("correction", [SpikeCompensation(), LookAhead()], ids=lambda c: c.name)
def test_spike_compensation_at_lag_one_is_nesterov(correction: Correction) -> None:
    """Two stages of PipeDream: lag 1 at the first. The very first update lags by 0."""

    def nesterov(params: Any) -> torch.optim.Optimizer:
        first = sum(p.numel() for p in params) == 6 * 8 + 8
        return Delayed(params, lr=0.05, momentum=0.9, nesterov=first)

    class Delayed(torch.optim.SGD):
        """Heavy ball in its first step, Nesterov's momentum from then on."""

        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            wanted = group["nesterov"]
            group["nesterov"] = wanted and bool(self.state)
            super().step(closure)
            group["nesterov"] = wanted

    heavy = trained(
        mlp(), vector_batches(9), PipeDream(),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), cuts=[2], corrections=[correction],
    )  # fmt: skip
    expected = trained(mlp(), vector_batches(9), PipeDream(), nesterov, cuts=[2])
    for ours, theirs in zip(
        heavy.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_shrinking_is_fdg_s_beta() -> None:
    batches = image_batches(7)
    expected = trained(cnn(), batches, FDG(beta=0.5), cuts=[3, 5])
    ours = trained(cnn(), batches, FDG(), cuts=[3, 5], corrections=[Shrink(beta=0.5)])
    assert_same_bits(ours.state_dict(), expected.state_dict())


@pytest.mark.parametrize("momentum", [0.9, 0.99])
def test_the_fitted_horizon_finds_the_geometric_sum(momentum: float) -> None:
    """Gradients of pure noise: momentum alone says where the weights will be."""
    torch.manual_seed(0)
    steps, lag = 600, 3

    def loss(output: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return (output * noise).sum()

    stages = [Vector(2000), *(nn.Identity() for _ in range(lag))]
    trainer = offbeat.Trainer(
        stages,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=momentum),
        method=PipeDream(),
        corrections=[Predict(horizon="fitted")],
    )
    for _ in range(steps):
        trainer.step(torch.ones(2000).double(), torch.randn(2000).double())
    (hook,) = trainer._engine.workers[0].stage.corrector.hooks
    assert isinstance(hook, Prediction) and hook._fit is not None
    assert float(hook._fit.horizon(lag)) == pytest.approx(oracle.geometric(momentum, lag), rel=0.01)


# ------------------------------------------------------------------ stability


class Vector(nn.Module):
    """As many independent problems of one weight each, trained at once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, self.weight)


def diverges(
    curvatures: torch.Tensor, lag: int, corrections: list[Correction], steps: int, **sgd: Any
) -> torch.Tensor:
    """For f = curvature w^2 / 2 each: whether |w| still grows in the last quarter of a run."""
    stages = [Vector(len(curvatures)), *(nn.Identity() for _ in range(lag))]
    trainer = offbeat.Trainer(
        stages,
        loss=lambda output, curvature: 0.5 * (curvature * output**2).sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, **sgd),
        method=PipeDream(),
        corrections=corrections,
    )
    sizes = []
    for _ in range(steps):
        trainer.step(torch.ones_like(curvatures), curvatures)
        sizes.append(trainer.model.state_dict()["0.weight"].abs().clone())
    quarters = torch.stack(sizes).unflatten(0, (4, -1)).amax(1)
    return torch.logical_not(quarters[3] <= quarters[2])


def threshold(lag: int, corrections: list[Correction], steps: int = 1200, **sgd: Any) -> float:
    """The largest stable ``lr / (1 - momentum) x curvature``, of a grid that is run as one."""
    grid = torch.linspace(0.1, 4.0, 1951, dtype=torch.float64)
    first = int(diverges(grid, lag, corrections, steps, **sgd).nonzero()[0])
    return float(grid[first - 1] + grid[first]) / 2


DIFFERENCE = Predict(direction="difference", horizon="lag")


@pytest.mark.parametrize(
    ("corrections", "lag", "expected"),
    [
        ([], 1, 1.000),
        ([SpikeCompensation()], 1, 2.531),
        ([Predict(horizon="lag")], 1, 2.702),
        ([DIFFERENCE], 1, 2.702),
        ([Extrapolate()], 1, 2.702),
        ([DIFFERENCE, SpikeCompensation()], 1, 3.45),
        ([SpikeCompensation()], 2, 1.141),
        ([Predict()], 2, 1.141),
        ([Predict(horizon="lag")], 2, 1.210),
    ],
    ids=lambda value: "+".join(c.name for c in value) if isinstance(value, list) else str(value),
)
def test_stability_on_a_quadratic_is_the_companion_matrix_s(
    corrections: list[Correction], lag: int, expected: float
) -> None:
    """Found by running; a delay that is off by one moves every number by half and more."""
    assert threshold(lag, corrections) == pytest.approx(expected, abs=1.5e-3)


# ------------------------------------------------------------------ engines


@pytest.mark.timeout(240)
def test_processes_give_the_bits_of_one() -> None:
    stages = 3
    todo: list[Any] = [
        ("cnn", PipeDream(), stages, "momentum", {"corrections": TOGETHER}),
        ("dropout", ADL(2), stages, "adamw", {"corrections": TOGETHER}),
        ("cnn", StaleWeights(), stages, "momentum", {"corrections": REWINDING}),
        ("dropout", DSP(), stages, "adamw", {"corrections": REWINDING, "clip": 0.3}),
        ("cnn", Phases((StaleWeights(), 3), (Synchronous(), None)), stages, "momentum",
         {"corrections": [Predict(horizon="fitted"), Extrapolate()]}),
        ("dropout", "auto", stages, "momentum", {"corrections": [Predict()]}),
        ("dropout", PipeDream(), stages, "sgd",
         {"corrections": [Predict(horizon="lag")], "autocast": torch.bfloat16}),
    ]  # fmt: skip
    by_rank = offbeat.launch(jobs.train_all, stages, todo, timeout_s=200)
    for place, (model, method, _, optimizer, settings) in enumerate(todo):
        alone = jobs.train(model, method, stages, optimizer, **settings)
        plain = jobs.train(model, method, stages, optimizer, **(settings | {"corrections": []}))
        with pytest.raises(AssertionError):  # else nothing would have been compared
            assert_same_bits(alone["state"], plain["state"])
        for rank in range(stages):
            assert_same_bits(by_rank[rank][place]["state"], alone["state"])
            assert by_rank[rank][place]["losses"] == alone["losses"]
            assert by_rank[rank][place]["lags"] == alone["lags"]


def test_any_interleaving_gives_one_result() -> None:
    results = []
    for seed in range(8):
        trainer = trainer_for(mlp(), ADL(2), cuts=[2, 4], corrections=TOGETHER)
        interleave(trainer, seed)
        for x, y in vector_batches(7):
            trainer.step(x, y)
        trainer.flush()
        results.append(trainer.state_dict())
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_replicas_correct_by_themselves() -> None:
    """Weights that a merge has written are what the next forward reads, and predicts from."""
    averaging = DaSGD(every=2, delay=1)
    results = [
        jobs.train_replicas("cnn", PipeDream(), averaging, 2, 2, corrections=corrections)
        for corrections in (TOGETHER, TOGETHER, [])
    ]
    assert_same_bits(results[0]["after"], results[1]["after"])
    with pytest.raises(AssertionError):
        assert_same_bits(results[0]["after"], results[2]["after"])


# ------------------------------------------------------------------ looking and saving


def test_evaluation_and_state_show_the_real_weights() -> None:
    trainer = trainer_for(mlp(), PipeDream(), cuts=[2, 4], corrections=[Predict(horizon="lag")])
    batches = vector_batches(6)
    for x, y in batches:
        trainer.step(x, y)
    before = trainer.state_dict()
    plain = mlp()
    plain.load_state_dict(before)
    x, y = batches[0]
    expected = nn.functional.cross_entropy(plain(x), y).item()
    assert trainer.evaluate([(x, y)]).loss == pytest.approx(expected, abs=1e-12)
    assert_same_bits(trainer.state_dict(), before)


def halve_rates(trainer: offbeat.Trainer) -> None:
    """What a schedule does; gap-aware gradients remember the largest rate."""
    for worker in trainer._engine.workers:
        worker.stage.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("stop", [5, 9])
def test_a_saved_run_goes_on_as_if_nothing_had_happened(stop: int) -> None:
    corrections = [*TOGETHER, ClipPerStage(times=2.0)]
    corrections.remove(ClipPerStage(norm=1e-3))
    batches = vector_batches(14)

    def run(trainer: offbeat.Trainer, part: Any) -> None:
        for x, y in part:
            trainer.step(x, y)
        trainer.flush()

    whole = trainer_for(mlp(), PipeDream(), cuts=[2, 4], corrections=corrections)
    run(whole, batches[:stop])
    stages = [worker.stage for worker in whole._engine.workers]
    saved = whole.state_dict()
    memory = [stage.corrector.state_dict() for stage in stages]
    moments = [copy.deepcopy(stage.optimizers[0].state_dict()) for stage in stages]
    halve_rates(whole)
    run(whole, batches[stop:])

    again = trainer_for(mlp(1), PipeDream(), cuts=[2, 4], corrections=corrections)
    again.load_state_dict(saved)
    for worker, own, optimizer in zip(again._engine.workers, memory, moments, strict=True):
        worker.stage.version = stop
        worker.stage.optimizers[0].load_state_dict(optimizer)
        worker.stage.corrector.load_state_dict(own)
    halve_rates(again)
    run(again, batches[stop:])
    assert_same_bits(again.state_dict(), whole.state_dict())
    remembered = " ".join(memory[0]["memory"])
    assert all(name in remembered for name in ("predict", "extrapolate", "gap-aware"))


@pytest.mark.parametrize("correction", [*CORRECTIONS, Predict(horizon="fitted")], ids=str)
def test_a_drained_checkpoint_holds_what_corrections_remember(
    correction: Any, tmp_path: Path
) -> None:
    made = correction
    if isinstance(correction, type):
        made = ClipPerStage(times=1.05) if correction is ClipPerStage else correction()
    batches = vector_batches(16)
    method = StaleWeights() if isinstance(made, Rewind) else PipeDream()
    first, again = (trainer_for(mlp(), method, stages=3, corrections=[made]) for _ in range(2))
    for x, y in batches[:8]:
        first.step(x, y)
    first.save(tmp_path, drain=True, wait=True)
    again.resume(tmp_path)
    for trainer in (first, again):
        for x, y in batches[8:]:
            trainer.step(x, y)
        trainer.flush()
    assert_same_bits(again.state_dict(), first.state_dict())
    # Where others correct, they begin anew.
    other = trainer_for(mlp(), method, stages=3, corrections=[RateByLag(power=0.5)])
    other.resume(tmp_path)
    other.step(*batches[8])


def test_loaded_weights_leave_nothing_of_a_checkpoint_that_was_not_used_yet(tmp_path: Path) -> None:
    batches = vector_batches(12)
    settings: dict[str, Any] = {"cuts": [2, 4], "corrections": [Extrapolate(), GapAware()]}
    trained(mlp(), batches[:6], PipeDream(), **settings).save(tmp_path, drain=True, wait=True)
    other = mlp(seed=5).state_dict()
    ends = []
    for remembers in (True, False):
        trainer = trainer_for(mlp(), PipeDream(), **settings)
        trainer.resume(tmp_path)
        if not remembers:
            for worker in trainer._engine.workers:
                worker.stage.corrector.load_state_dict({})
        trainer.load_state_dict(other)
        for x, y in batches[6:]:
            trainer.step(x, y)
        trainer.flush()
        ends.append(trainer.state_dict())
    assert_same_bits(*ends)


def test_a_phase_without_lag_keeps_no_memory_of_one_with() -> None:
    method = Phases((PipeDream(), 4), (Synchronous(), None))
    corrections = [DelayCompensation(), Extrapolate()]
    trainer = trainer_for(mlp(), method, cuts=[2, 4], corrections=corrections)
    for number, (x, y) in enumerate(vector_batches(6)):
        trainer.step(x, y)
        kept = [memory.correction_bytes for memory in trainer.memory()]
        assert (kept[0] > 0) == (number < 4)
    trainer.load_state_dict(trainer.state_dict())
    assert [memory.correction_bytes for memory in trainer.memory()] == [0, 0, 0]


# ------------------------------------------------------------------ what a GPU engine relies on


class NothingReadBack(TorchDispatchMode):
    """Refuses every operation that would bring a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default,), "a value was read back"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("correction", [*EACH, Rewind()], ids=str)
def test_hooks_are_tensor_operations_on_memory_of_their_own(
    correction: Correction, optimizer: str, monkeypatch: Any
) -> None:
    def watched(method: Any) -> Any:
        def call(*args: Any) -> Any:
            with NothingReadBack():  # type: ignore[no-untyped-call]
                return method(*args)

        return call

    acting = [
        "forward_weights",
        "backward_weights",
        "gradients",
        "before_step",
        "after_step",
        "observe",
    ]
    method = StaleWeights(backward="current") if isinstance(correction, Rewind) else PipeDream()
    trainer = trainer_for(mlp(), method, OPTIMIZERS[optimizer], cuts=[2, 4],
                          corrections=[correction])  # fmt: skip
    places: list[list[int]] = []
    for x, y in vector_batches(8):
        trainer.step(x, y)
        (hook,) = trainer._engine.workers[0].stage.corrector.hooks
        for name in acting:
            if not places:
                monkeypatch.setattr(hook, name, watched(getattr(hook, name)))
        places.append([t.data_ptr() for tensors in hook.memory().values() for t in tensors])
    assert all(place == places[0] for place in places)


@pytest.mark.parametrize(
    ("correction", "copies"),
    [
        (SpikeCompensation(), (0, 0, 0)),
        (Predict(direction="difference"), (2, 2, 0)),
        (Extrapolate(), (2, 2, 0)),
        (DelayCompensation(), (3, 2, 0)),
        (DelayCompensation(adaptive=True), (4, 3, 0)),
        (GapAware(), (4, 3, 0)),
        (Rewind(), (2, 2, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 2])
def test_what_corrections_keep_is_counted(
    correction: Correction, copies: tuple[int, ...], parts: int
) -> None:
    """In copies of the weights, as the table says; those that average over parts keep one more."""
    layers = [nn.Linear(6, 6, bias=False) for _ in range(3)]
    rule: Rule = "current" if isinstance(correction, Rewind) else "stash"
    method: Method = PipeDream(backward=rule)
    if parts == 2:
        method = StaleWeights(backward=rule, accumulate=2)
    trainer = trainer_for(layers, method, corrections=[correction])
    for x, y in vector_batches(8, rows=4, dtype=torch.float32):
        trainer.step(x, y)
    assert trainer.lags == (2, 1, 0)
    averaged = parts == 2 and isinstance(correction, DelayCompensation | GapAware)
    wanted = [count + averaged if count else 0 for count in copies]
    assert [m.correction_bytes // (6 * 6 * 4) for m in trainer.memory()] == wanted


def test_predictions_that_a_correction_will_ask_for_are_counted_with_the_versions() -> None:
    layers = [nn.Linear(6, 6, bias=False) for _ in range(3)]
    corrections = [Predict(), DelayCompensation()]
    trainer = trainer_for(layers, StaleWeights(), corrections=corrections)
    for x, y in vector_batches(12, rows=4, dtype=torch.float32):
        trainer.step(x, y)
    lent = [
        len(list(worker.stage.corrector.predicted_in_flight()))
        for worker in trainer._engine.workers
    ]
    assert lent == [4, 2, 0]
    assert [m.weight_copies for m in trainer.memory()] == [5, 3, 1]


def test_predictions_take_no_more_memory_than_versions() -> None:
    """Micro-batches of one version and lag share one prediction, and no other copy is made.

    The weights themselves stay where they are: nothing in flight refers to them.
    """
    trainer = trainer_for(mlp(), PipeDream(), cuts=[2, 4], corrections=[Predict()])
    plain = trainer_for(mlp(), PipeDream(), cuts=[2, 4])
    places = []
    for x, y in vector_batches(8):
        trainer.step(x, y)
        plain.step(x, y)
        places.append([p.data_ptr() for p in trainer.model.parameters()])
    assert places[-1] == places[-2] == places[-3]
    for ours, theirs in zip(trainer.memory(), plain.memory(), strict=True):
        assert ours.weight_copies <= theirs.weight_copies + 1


# ------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("corrections", "method", "words"),
    [
        (["predict", "predict"], PipeDream(), "predict is there twice"),
        (["predikt"], PipeDream(), "Did you mean 'predict'"),
        ("predict", PipeDream(), r"give a list, as in corrections=\['predict'\]"),
        ([3], PipeDream(), "give objects from offbeat.corrections"),
        (["rewind"], PipeDream(), "backward='stash' keeps them"),
        (["gap-aware"], DSP(), "under backward='recompute' these are the same"),
        (["delay-compensation"], DSP(), "leave it out"),
        (["predict"], PipeDream2BW(), "reads? an older version on purpose"),
    ],
)
def test_what_makes_no_sense_is_refused(corrections: Any, method: Method, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer_for(mlp(), method, cuts=[2], corrections=corrections)


class Twice(PipeDream2BW):
    title = "Somebody's method"


@pytest.mark.parametrize(
    ("correction", "method"),
    [
        ("predict", Twice()),
        ("rewind", Twice()),
        ("gap-aware", Twice(backward="recompute")),
        ("delay-compensation", Phases((Twice(backward="recompute"), 2), (PipeDream(), None))),
    ],
)
def test_a_refusal_names_the_method_at_hand(correction: str, method: Method) -> None:
    with pytest.raises(ConfigurationError, match="^under Somebody's method, ") as caught:
        trainer_for(mlp(), method, cuts=[2], corrections=[correction])
    assert "2BW" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: correction_named("predict", horizon="linear"), "unknown horizon 'linear'"),
        (lambda: Predict(horizon=-1), "horizon=-1"),
        (lambda: correction_named("predict", direction="up"), "unknown direction 'up'"),
        (lambda: Shrink(beta=2), "beta=2.*above 0 and at most 1"),
        (lambda: RateByLag(plus=3), "plus=3.*give 1 for lr"),
        (lambda: MomentumByLag(towards=1), "below 1"),
        (lambda: ClipPerStage(times=1), "above 1"),
        (lambda: GapAware(decay=1.0), "never begins"),
        (lambda: ClipPerStage(), "give one of the two"),
        (lambda: ClipPerStage(norm=0), "norm=0"),
        (lambda: correction_named("extrapolate", gane=2), "has no setting 'gane': it takes gain"),
    ],
)
def test_bad_settings_get_words(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize(
    ("correction", "optimizer", "words"),
    [
        (SpikeCompensation(), lambda p: torch.optim.RMSprop(p), "rewrites the steps of SGD"),
        (
            SpikeCompensation(),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            "SGD with nesterov",
        ),
        (MomentumByLag(), lambda p: torch.optim.SGD(p, lr=0.1), "no momentum to change"),
        (Predict(), lambda p: torch.optim.Adagrad(p), "Use horizon=lag or fitted"),
        (GapAware(), lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "negate the loss"),
        (DelayCompensation(), lambda p: torch.optim.AdamW(p, maximize=True), "negate the loss"),
        (DelayCompensation(), torch.optim.SparseAdam, "SparseAdam of stage 0 takes sparse ones"),
        (GapAware(), torch.optim.SparseAdam, "gap-aware goes through gradients element by"),
        (ClipPerStage(norm=1), torch.optim.SparseAdam, "Use nn.Embedding.*sparse=False. with Adam"),
    ],
)
def test_an_optimizer_that_does_not_fit_gets_words(
    correction: Correction, optimizer: Any, words: str
) -> None:
    for method in (PipeDream(), Phases((Synchronous(), 5), (PipeDream(), None))):
        with pytest.raises(ConfigurationError, match=words):
            trainer_for(mlp(), method, optimizer, cuts=[2], corrections=[correction])


@pytest.mark.parametrize("correction", [Predict(), Rewind()])
def test_weights_with_holes_are_refused_where_others_are_lent(correction: Correction) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(8, 12, dtype=torch.float64)[:, ::2])
    with pytest.raises(ConfigurationError, match="is a view with holes in it"):
        offbeat.Trainer(  # over the model itself: a copy has no holes
            model, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["momentum"],
            method=StaleWeights(), cuts=[2], corrections=[correction],
        )  # fmt: skip


# ------------------------------------------------------------------ what gets no gradient


def test_a_stage_below_a_head_of_zeros_is_not_clipped_to_nothing() -> None:
    model = mlp()
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]
    batches = vector_batches(1) * 8
    clip = ClipPerStage(times=3)
    sgd = OPTIMIZERS["sgd"]  # no decay that would move them anyway
    found = trained(model, batches, PipeDream(), sgd, cuts=[2, 4], corrections=[clip])
    assert not torch.equal(found.state_dict()["0.weight"], model.state_dict()["0.weight"])


NEEDS_MOMENTUM = {SpikeCompensation, LookAhead, MomentumByLag, Predict}


@pytest.mark.parametrize(
    ("correction", "name"),
    [
        *((kind, "momentum") for kind in CORRECTIONS),
        *((kind, "adamw") for kind in CORRECTIONS),
        *((kind, "sgd") for kind in CORRECTIONS if kind not in NEEDS_MOMENTUM),
    ],
)
def test_an_update_that_is_skipped_moves_nothing(name: str, correction: type[Correction]) -> None:
    made = ClipPerStage(times=3) if correction is ClipPerStage else correction()
    method = StaleWeights() if correction is Rewind else PipeDream()
    trainer = trainer_for(
        mlp(), method, OPTIMIZERS[name], cuts=[2, 4], corrections=[made],
        guards=offbeat.Guards(nonfinite="skip"),
    )  # fmt: skip
    stage = trainer._engine.workers[0].stage
    weights: dict[int, list[Tensor]] = {}
    for number, (x, y) in enumerate(vector_batches(12)):
        trainer.step(x * float("nan") if number == 5 else x, y)
        weights[stage.version] = [p.detach().clone() for p in stage.parameters]
    skipped = next(u.update for u in trainer.updates if u.stage == 0 and u.outcome == "skipped")
    assert all(map(torch.equal, weights[skipped], weights[skipped + 1]))
    assert not any(map(torch.equal, weights[skipped - 1], weights[skipped]))


def test_nothing_is_predicted_for_weights_that_are_not_on_their_way() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), cuts=[2, 4], corrections=[Predict()])
    stage = trainer._engine.workers[0].stage
    for number, (x, y) in enumerate(vector_batches(12)):
        if number == 6:
            trainer.model[0].requires_grad_(False)  # type: ignore[index]
        trainer.step(x, y)
    lent = stage.corrector.predict(Moment(4, stage.version))
    assert lent is not None
    assert all(map(torch.equal, lent, stage.parameters))


def test_a_weight_whose_first_gradient_comes_late_is_corrected_like_others() -> None:
    """Both have moved by one usual step: half of a gradient is left, from the first on."""
    early, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))
    groups = groups_of([torch.optim.SGD([early, late], lr=0.1)])
    around = Surroundings(stage=0, stages=2, lag=2, parameters=(early, late), groups=groups)
    hook = GapAware().hook(around)
    read = (torch.full((3,), -0.1), torch.tensor(-0.1))
    for update in range(70):
        early.grad = torch.ones(3)
        late.grad = torch.tensor(1.0) if update >= 60 else None
        with torch.no_grad():
            hook.gradients(hook.numbers(Moment(2, update)), read)
        torch.testing.assert_close(early.grad, torch.full((3,), 0.5))
        if late.grad is not None:
            torch.testing.assert_close(late.grad, torch.tensor(0.5))


class Scaled(nn.Linear):
    """Has a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale.dtype == torch.float32
        return torch.stack([self.scale, self.scale]).sum() * super().forward(x)


def test_a_single_number_keeps_its_type_when_predicted() -> None:
    batches = vector_batches(5, dtype=torch.float32)
    trained([Scaled(), nn.Linear(6, 4)], batches, PipeDream(), OPTIMIZERS["adamw"],
            corrections=[Predict()])  # fmt: skip


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights()])
def test_adam_s_step_is_its_rate_under_any_momentum_by_lag(method: Method) -> None:
    """For a gradient that does not change, whatever beta1 is: its bias correction holds."""
    lr = 0.01

    def loss(output: Tensor, target: Tensor) -> Tensor:
        del target
        return output.sum()

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    stages = [Adding() for _ in range(4)]
    trainer = offbeat.Trainer(
        stages, loss=loss, optimizer=lambda p: torch.optim.Adam(p, lr=lr), method=method,
        corrections=[MomentumByLag()],
    )  # fmt: skip
    x = torch.zeros(2, dtype=torch.float64)
    for _ in range(20):
        trainer.step(x, x)
    trainer.flush()
    for worker in trainer._engine.workers:
        (shift,) = worker.stage.parameters
        assert shift.item() == pytest.approx(-lr * worker.stage.version, rel=1e-6)


def test_shrinking_passes_a_stage_without_weights_as_fdg_does() -> None:
    stages = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)]
    batches = vector_batches(8, dtype=torch.float32)
    ours = trained(stages, batches, FDG(beta=1), corrections=[Shrink(beta=0.5)])
    assert_same_bits(ours.state_dict(), trained(stages, batches, FDG(beta=0.5)).state_dict())


# ------------------------------------------------------------------ the command line


def test_corrections_come_by_flags_and_by_file_alike(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'correction = ["predict:horizon=lag", {name = "clip-per-stage", norm = 2.0}]\n'
        'method = "pipedream"\n'
    )
    flags = {"correction": ["predict:horizon=lag", "clip-per-stage:norm=2.0"]}
    from_file = Experiment.read(given_settings(str(file), {}))
    assert from_file == Experiment.read(given_settings(None, flags | {"method": "pipedream"}))
    assert corrections_of(from_file) == [Predict(horizon="lag"), ClipPerStage(norm=2.0)]
    assert Experiment.read(json.loads(json.dumps(from_file.as_dict()))) == from_file
    assert Experiment.read(given_settings(str(file), {"correction": ["shrink"]})).correction == (
        Choice("shrink"),
    )


def test_a_run_stores_its_corrections(tmp_path: Path, capsys: Any) -> None:
    line = f"train --method pipedream --stages 2 --epochs 1 --out {tmp_path / 'run'}"
    with pytest.raises(SystemExit) as left:
        main([*line.split(), "--correction", "extrapolate", "--correction", "rate-by-lag:plus=0"])
    assert not left.value.code
    assert "update extrapolation, learning rate by lag" in capsys.readouterr().out
    assert Run.load(tmp_path / "run").config["correction"] == [
        {"name": "extrapolate", "settings": {}},
        {"name": "rate-by-lag", "settings": {"plus": 0}},
    ]


def test_the_list_of_corrections(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["corrections", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [correction.name for correction in CORRECTIONS]
    with pytest.raises(SystemExit):
        main(["corrections"])
    assert "predict:horizon=lag" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "words"),
    [("predikt", "Did you mean 'predict'"), ("shrink:beta=3", "beta=3.*at most 1")],
)
def test_a_mistyped_correction_is_one_line(
    flag: str, words: str, capsys: Any, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "--stages", "2", "--method", "pipedream", "--out", str(tmp_path / "run"),
              "--correction", flag])  # fmt: skip
    assert left.value.code == 2
    assert re.match(f"Error: .*{words}", capsys.readouterr().err)


# ------------------------------------------------------------------ the page


def test_the_page_names_every_correction() -> None:
    text = (Path(__file__).parent.parent / "docs" / "corrections.md").read_text()
    for correction in CORRECTIONS:
        assert f"| `{correction.__name__}(" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"corrections": [DelayCompensation()]},
        {"corrections": [GapAware()]},
        {"corrections": [ClipPerStage(norm=0.5)]},
        {"corrections": [Predict(horizon="fitted")]},
        {"monitor": Monitor(every=2, probe=True)},
        {"replicas": 2},
    ],
    ids=lambda settings: str(*settings.values()),
)
@pytest.mark.parametrize(
    "method",
    [StaleWeights(backward="stash"), Phases((Synchronous(), 3), (PipeDream(), None))],
    ids=["stale", "phases"],
)
def test_sparse_gradients_are_corrected_watched_and_averaged_like_others(
    settings: dict[str, Any], method: Method
) -> None:
    batches = [(torch.randint(9, (8, 2)), torch.randint(4, (8,))) for _ in range(6)]

    def run(sparse: bool) -> offbeat.Trainer:
        torch.manual_seed(0)
        layers = nn.Embedding(9, 6, sparse=sparse), nn.Flatten(), nn.Linear(12, 4)
        trainer = trainer_for(
            nn.Sequential(*layers), method,
            lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9), cuts=[2], **settings,
        )  # fmt: skip
        for x, y in batches:
            trainer.step(x, y)
        if "monitor" in settings:
            trainer.probe(*batches[0])
        trainer.flush()
        return trainer

    ours, theirs = run(sparse=True), run(sparse=False)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    for one, other in zip(ours.readings, theirs.readings, strict=True):
        assert one.value == pytest.approx(other.value, nan_ok=True)


def adam_for_each(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """What sparse gradients are usually given: SparseAdam for the embedding, Adam for the rest."""
    embedding = [p for p in params if p.shape == (9, 6)]
    rest = [p for p in params if p.shape != (9, 6)]
    made = [torch.optim.SparseAdam(embedding)] if embedding else []
    return [*made, torch.optim.Adam(rest)] if rest else [*made]


def test_sparse_adam_is_refused_where_gradients_are_averaged() -> None:
    layers = nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4)

    def made(averaging: Any) -> offbeat.Trainer:
        return offbeat.Trainer(
            nn.Sequential(*layers), loss=nn.functional.cross_entropy, optimizer=adam_for_each,
            cuts=[2], replicas=2, averaging=averaging,
        )  # fmt: skip

    for averaging in (None, AllReduce(), DaSGD(every=2, delay=1, warmup=3)):
        with pytest.raises(
            ConfigurationError, match="SparseAdam of stage 0 takes sparse ones only"
        ):
            made(averaging)
    trainer = made(LocalSGD(every=2))
    for _ in range(4):
        trainer.step(torch.randint(9, (8, 2)), torch.randint(4, (8,)))
    trainer.flush()


# ------------------------------------------------------------------ whatever joins the list


def example_of(kind: type[Correction]) -> Correction:
    return ClipPerStage(times=1.05) if kind is ClipPerStage else kind()


def method_for(kind: type[Correction], **settings: Any) -> Method:
    return StaleWeights(**settings) if kind is Rewind else PipeDream(**settings)


EVERY = pytest.mark.parametrize("kind", CORRECTIONS, ids=lambda kind: kind.name)


def test_every_correction_is_in_the_lists_of_this_file() -> None:
    listed = {type(correction) for correction in [*EACH, Rewind()]}
    missing = [kind.name for kind in CORRECTIONS if kind not in listed]
    assert not missing, f"{missing}: add one of each to EACH in {__file__}"


@EVERY
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_two_groups_of_one_setting_are_one(kind: type[Correction], name: str) -> None:
    def in_two(params: Any) -> torch.optim.Optimizer:
        first, *rest = params
        return OPTIMIZERS[name]([{"params": [first]}, {"params": rest}])

    ends = [
        trained(
            mlp(), vector_batches(9), method_for(kind), factory, cuts=[2, 4],
            corrections=[example_of(kind)],
        ).state_dict()
        for factory in (OPTIMIZERS[name], in_two)
    ]  # fmt: skip
    assert_same_bits(*ends)


class BesideUnused(nn.Linear):
    """Its first parameter, where there is one, never gets a gradient."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__(6, 8, dtype=torch.float64)
        if unused:
            own = dict(self.named_parameters())
            self._parameters = {"unused": nn.Parameter(self.weight.detach().clone()), **own}


@EVERY
def test_a_weight_without_gradients_changes_nothing_for_others(kind: type[Correction]) -> None:
    ends = []
    for unused in (False, True):
        torch.manual_seed(0)
        stages = [
            BesideUnused(unused=unused),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 4, dtype=torch.float64)),
        ]
        end = trained(
            stages, vector_batches(9), method_for(kind), OPTIMIZERS["momentum"],
            corrections=[example_of(kind)],
        )  # fmt: skip
        ends.append({k: v for k, v in end.state_dict().items() if "unused" not in k})
    assert_same_bits(*ends)


ONE_GPU = (Path(__file__).parents[1] / "docs" / "one-gpu.md").read_text()


def hooks_of(kind: type[Correction], accumulate: int) -> tuple[offbeat.Trainer, list[Hook]]:
    """A trainer in its first fill, and the hooks of its first stage."""
    method = method_for(kind, accumulate=accumulate)
    trainer = trainer_for(mlp(), method, cuts=[2, 4], corrections=[example_of(kind)])
    trainer.step(*vector_batches(1)[0])
    return trainer, trainer._engine.workers[0].stage.corrector.hooks


@EVERY
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_repeats_has_the_same_numbers_in_every_update(
    kind: type[Correction], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded update asks for them once, and has them built in."""
    trainer, (hook,) = hooks_of(kind, accumulate)
    assert hook.repeats or re.search(rf"`{kind.name}`(?! with)", ONE_GPU), "name it in one-gpu.md"
    if not hook.repeats or kind is Predict:  # whose numbers are asked for anew
        return
    seen: dict[int, list[Any]] = {}
    ask = hook.numbers

    def kept(moment: Moment) -> Any:
        found = ask(moment)
        seen.setdefault(moment.lag, []).append(list(map(float, found)))
        return found

    monkeypatch.setattr(hook, "numbers", kept)
    for x, y in vector_batches(12):
        trainer.step(x, y)
    assert all(numbers == found[0] for found in seen.values() for numbers in found)


def test_two_that_choose_the_same_weights_are_refused() -> None:
    @dataclass(frozen=True)
    class Other(Predict):
        name = "other"

    words = "predict and other both choose the forward weights"
    with pytest.raises(ConfigurationError, match=words):
        trainer_for(mlp(), PipeDream(), cuts=[2, 4], corrections=[Predict(), Other()])


def test_memory_that_does_not_fit_a_checkpoint_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"cuts": [2, 4], "corrections": [Extrapolate()]}
    trainer = trainer_for(mlp(), PipeDream(), **settings)
    for x, y in vector_batches(5):
        trainer.step(x, y)
    trainer.save(tmp_path, wait=True)
    again = trainer_for(mlp(), PipeDream(), **settings)
    kind = type(trainer._engine.workers[0].stage.corrector.hooks[0])
    remembered = kind.memory
    monkeypatch.setattr(kind, "memory", lambda self: {"renamed": remembered(self)["previous"]})
    with pytest.warns(UserWarning, match="what its corrections remembered in this checkpoint does"):
        again.resume(tmp_path)
