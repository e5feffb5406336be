"""Bits: no lag is plain PyTorch, equal orders give equal weights, interleaving changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from helpers import (
    OPTIMIZERS,
    assert_same_bits,
    cnn,
    image_batches,
    interleave,
    mlp,
    plain_loop,
    trained,
    trainer_for,
    vector_batches,
)
from offbeat.methods import (
    ADL,
    DDG,
    DSP,
    METHODS,
    RULES,
    FeaturesReplay,
    GPipe,
    Method,
    OneFOneB,
    PipeDream,
    StaleWeights,
    Synchronous,
)

CUTS: dict[int, list[int]] = {1: [], 2: [5], 3: [2, 5], 4: [2, 4, 7]}


def zero_lag(stages: int) -> list[Method]:
    zeros = (0,) * stages
    return [
        Synchronous(),
        *(DSP(lag=zeros, backward=rule) for rule in RULES),
    ]


def micro_batched(stages: int) -> list[tuple[Method, int]]:
    zeros = (0,) * stages
    return [
        (GPipe(3), 3),
        (OneFOneB(3), 3),
        *((DSP(lag=zeros, backward=rule, accumulate=2), 2) for rule in RULES),
    ]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("stages", CUTS)
def test_zero_lag_equals_plain_pytorch(stages: int, optimizer: str) -> None:
    batches = image_batches(5, last_rows=3)
    factory = OPTIMIZERS[optimizer]
    expected, losses = plain_loop(cnn(), batches, factory)
    for method in zero_lag(stages):
        trainer = trainer_for(cnn(), method, factory, cuts=CUTS[stages])
        assert [float(trainer.step(x, y)) for x, y in batches] == losses  # type: ignore[arg-type]
        assert trainer.flush() == []
        assert_same_bits(trainer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("stages", CUTS)
def test_zero_lag_with_micro_batches_equals_an_accumulating_loop(
    stages: int, optimizer: str
) -> None:
    batches = image_batches(4, rows=7, last_rows=5)  # divides by neither 2 nor 3
    factory = OPTIMIZERS[optimizer]
    for method, parts in micro_batched(stages):
        expected, losses = plain_loop(cnn(), batches, factory, micro_batches=parts)
        trainer = trainer_for(cnn(), method, factory, cuts=CUTS[stages])
        ours = [float(trainer.step(x, y)) for x, y in batches]  # type: ignore[arg-type]
        assert ours == pytest.approx(losses, rel=1e-6)
        assert_same_bits(trainer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("method", [m() for m in METHODS if not any(m().lags(1))])
def test_one_stage_is_plain_training_for_every_method(method: Method) -> None:
    parts = method.schedule(1).micro_batches
    batches = image_batches(4)
    expected, _ = plain_loop(cnn(), batches, micro_batches=parts)
    assert_same_bits(trained(cnn(), batches, method, stages=1).state_dict(), expected.state_dict())


@pytest.mark.parametrize("rule", RULES)
def test_a_learning_rate_of_zero_makes_all_rules_one(rule: Any) -> None:
    """With weights that never move, staleness cannot show: gradients equal those of plain BP."""
    seen: dict[str, list[Tensor]] = {}
    for name, method in (("plain", Synchronous()), ("stale", StaleWeights(backward=rule))):
        gradients: list[Tensor] = []

        class Recorder(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    gradients.extend(p.grad.clone() for p in group["params"])  # noqa: B023
                return None

        trained(mlp(), vector_batches(5), method, lambda p: Recorder(p, lr=0.0), cuts=[2, 4])
        seen[name] = sorted(gradients, key=lambda g: (tuple(g.shape), float(g.sum())))
    assert len(seen["plain"]) == len(seen["stale"])
    assert all(map(torch.equal, seen["plain"], seen["stale"]))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pipedream_equals_ddg_and_features_replay_equals_dsp(stages: int, optimizer: str) -> None:
    lag = tuple(stages - 1 - k for k in range(stages))
    for one, other in ((PipeDream(), DDG()), (FeaturesReplay(), DSP(lag=lag))):
        states = [
            trained(cnn(), image_batches(7), m, OPTIMIZERS[optimizer], cuts=CUTS[stages])
            for m in (one, other)
        ]
        assert_same_bits(states[0].state_dict(), states[1].state_dict())


@pytest.mark.parametrize("method", [m() for m in METHODS])
def test_fifty_interleavings_give_one_result(method: Method) -> None:
    batches = vector_batches(5, rows=8)
    results = []
    for seed in range(50):
        trainer = trainer_for(mlp(), method, stages=3)
        interleave(trainer, seed)
        for x, y in batches:
            trainer.step(x, y)
        trainer.flush()
        results.append(trainer.state_dict())
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_interleavings_really_differ() -> None:
    """The test above would prove nothing if the shuffle always chose the same worker."""
    orders = set()
    for seed in range(10):
        trainer = trainer_for(mlp(), StaleWeights(), stages=3)
        interleave(trainer, seed)
        for x, y in vector_batches(5):
            trainer.step(x, y)
        orders.add(tuple((e.kind, e.stage, e.batch) for e in trainer.ledger))
    assert len(orders) > 1


@pytest.mark.parametrize("stages", [2, 4])
def test_clipping_is_global_without_lag_and_per_stage_with_it(stages: int) -> None:
    batches = image_batches(4)
    expected, _ = plain_loop(cnn(), batches, clip=0.3)
    unclipped, _ = plain_loop(cnn(), batches)
    assert not torch.equal(expected[0].weight, unclipped[0].weight)  # type: ignore[arg-type]
    for method in zero_lag(stages):
        trainer = trained(cnn(), batches, method, cuts=CUTS[stages], clip=0.3)
        assert_same_bits(trainer.state_dict(), expected.state_dict())
    norms: list[float] = []

    class Recorder(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"]]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            return super().step(closure)

    trained(cnn(), batches, PipeDream(), lambda p: Recorder(p, lr=0.1), cuts=CUTS[stages], clip=0.3)
    assert max(norms) == pytest.approx(0.3, rel=1e-3)
    assert sum(norm > 0.29 for norm in norms) > 4  # each stage is clipped to the bound by itself


def test_schedulers_count_updates() -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.1)

    batches = image_batches(6)
    expected, _ = plain_loop(cnn(), batches, scheduler=scheduler)
    trainer = trained(cnn(), batches, cuts=[2, 5], scheduler=scheduler)
    assert_same_bits(trainer.state_dict(), expected.state_dict())

    trainer = trainer_for(cnn(), StaleWeights(), cuts=[2, 5], scheduler=scheduler)
    for x, y in batches:
        trainer.step(x, y)
    rates = [w.stage.optimizers[0].param_groups[0]["lr"] for w in trainer._engine.workers]
    # After six steps with lags 4, 2, 0 the stages have made 2, 4 and 6 updates.
    assert rates == pytest.approx([0.05 * 0.1, 0.05 * 0.01, 0.05 * 0.01])


@pytest.mark.parametrize("rule", RULES)
def test_dropout_draws_by_stage_and_micro_batch(rule: Any) -> None:
    """A reference loop seeded the same way gives the same bits; the caller's generator is kept."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)),
        nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 4)),
    ]
    batches = vector_batches(4, dtype=torch.float32)
    reference = copy.deepcopy(nn.Sequential(*stages))
    optimizer = OPTIMIZERS["momentum"](reference.parameters())
    for n, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        for k, stage in enumerate(reference):
            torch.manual_seed(offbeat.seed_for(5, stage=k, micro_batch=n))
            x = stage(x)
        nn.functional.cross_entropy(x, y).backward()
        optimizer.step()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    trainer = trained(stages, batches, DSP(lag=(0, 0), backward=rule), seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(trainer.state_dict(), reference.state_dict())


def test_recomputation_replays_dropout() -> None:
    """With weights that never move, recompute must give stash's gradients, masks included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 4))
    results = []
    for rule in RULES:
        trainer = trainer_for(
            model, StaleWeights(backward=rule), lambda p: torch.optim.SGD(p, lr=0.0), cuts=[2, 3]
        )
        sums = []
        for x, y in vector_batches(6, dtype=torch.float32):
            trainer.step(x, y)
            sums.append(trainer.ledger.losses(2))
        results.append(sums)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights(), DSP(), ADL(2), GPipe(2)])
def test_channels_last_survives_a_boundary(method: Method) -> None:
    batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in image_batches(5)]
    seen: list[tuple[int, ...]] = []
    model = cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainer = trainer_for(model, method, cuts=[3, 5])
    first = trainer._engine.workers[1].stage.module[0]  # type: ignore[index]
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0].stride()))
    for x, y in batches:
        trainer.step(x, y)
    assert all(stride[1] == 1 for stride in seen)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.places = nn.Linear(6, 8), nn.Parameter(torch.zeros(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inlet(x[:, None].expand(-1, 5, -1)) + self.places  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Whose gradient of its input is laid out otherwise than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].mean(1)  # type: ignore[no-any-return]


def test_gradients_pass_a_boundary_as_they_are_laid_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Places(), Recurrent(), nn.Linear(8, 4))
    batches = vector_batches(10, rows=8, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)
    assert_same_bits(trained(model, batches, cuts=[1, 2]).state_dict(), expected.state_dict())


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("method", [kind() for kind in METHODS], ids=lambda method: method.name)
def test_after_step_n_a_stage_has_applied_batches_0_to_n_minus_its_depth(
    method: Method, stages: int
) -> None:
    """What ``Trainer.step`` promises, by the ledger."""
    trainer = trainer_for(mlp(), method, stages=stages)
    depths = [method.schedule(stages).depth(stage) for stage in range(stages)]
    for n, (x, y) in enumerate(vector_batches(8)):
        trainer.step(x, y)
        for stage, depth in enumerate(depths):
            applied = [e.batch for e in trainer.ledger if (e.kind, e.stage) == ("U", stage)]
            assert applied == list(range(max(0, n + 1 - depth)))
    if method.name == "pipedream-2bw" and stages == 3:
        assert trainer.lags == (1, 1, 1)
        assert depths == [1, 1, 0]  # so that it has made 7 7 8 updates
