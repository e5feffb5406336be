"""Guards: what is not finite is named and held back, alike in one process and in many."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jobs
import offbeat
from helpers import (
    OPTIMIZERS,
    Batch,
    Factory,
    assert_same_bits,
    cnn,
    image_batches,
    interleave,
    mlp,
    plain_loop,
    trainer_for,
    vector_batches,
)
from offbeat import Guards, StaleWeights, Synchronous
from offbeat.app import cli
from offbeat.app.results import summarize_guards as summed_up
from offbeat.app.runs import Run
from offbeat.averaging import AllReduce, LocalSGD
from offbeat.errors import ConfigurationError, GuardError
from offbeat.guards import Guard, Update, Updates
from offbeat.methods import ADL, DGL, Method
from offbeat.stages.flight import Flight
from offbeat.stages.network import Network
from offbeat.stages.norms import Norms
from offbeat.stages.stage import Stage


def spoil(parameter: Any, at: int, value: float = math.nan) -> None:
    """Makes one element of a parameter's gradient not finite, in one backward."""
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls - 1 != at:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = value
        return spoilt

    parameter.register_hook(hook)


def guarded(
    model: nn.Sequential,
    batches: list[Batch],
    method: Method = Synchronous(),
    optimizer: Factory = OPTIMIZERS["momentum"],
    **settings: Any,
) -> offbeat.Trainer:
    """Trains the model itself, so that its hooks stay."""
    trainer = offbeat.Trainer(
        model, loss=nn.functional.cross_entropy, optimizer=optimizer, method=method, **settings
    )
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    return trainer


def with_nan(batches: list[Batch], number: int) -> list[Batch]:
    spoilt = [(x.clone(), y) for x, y in batches]
    spoilt[number][0].view(-1)[3] = math.nan
    return spoilt


# ------------------------------------------------------------------------- naming


def test_without_guards_the_first_bad_loss_is_named_and_nothing_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batches = with_nan(vector_batches(5), 2)
    plain, _ = plain_loop(mlp(), batches)
    trainer = trainer_for(mlp(), cuts=[4])
    for x, y in batches:
        trainer.step(x, y)
    for name, value in trainer.state_dict().items():
        assert torch.equal(value.isnan(), plain.state_dict()[name].isnan())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "stage 1: the loss of batch 2 is nan, at version 2" in record.message
    assert "Lower the learning rate" in record.message
    assert len(trainer.updates) == 0


def test_stop_names_the_loss() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), cuts=[4], guards=Guards())
    before = trainer.state_dict()
    x, y = with_nan(vector_batches(1), 0)[0]
    with pytest.raises(GuardError, match=r"stage 1: the loss of batch 0 is nan, at version 0 .*cl"):
        trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_stop_names_stage_update_batch_parameter_and_value(value: float) -> None:
    model = mlp()
    spoil(model[2].weight, 3, value)
    with pytest.raises(
        GuardError,
        match=rf"stage 0, update 3: the gradient of batch 3 \(lag 2\) is not finite: 1 {value} of"
        r" 56 in '2.weight'\. Lower",
    ):
        guarded(model, vector_batches(8), StaleWeights(), cuts=[4], guards=Guards())


def test_micro_batches_of_an_update_are_named() -> None:
    model = mlp()
    spoil(model[0].bias, 3)
    with pytest.raises(GuardError, match=r"update 1: the gradient of micro-batches 2, 3 .*0.bias"):
        guarded(model, vector_batches(6), ADL(2), cuts=[4], guards=Guards())


def test_a_head_of_its_own_is_named() -> None:
    def head(activation: Any, output: Any) -> nn.Module:
        made = nn.Linear(activation.shape[1], 4, dtype=torch.float64)
        spoil(made.weight, 1)
        return made

    with pytest.raises(GuardError, match=r"in 'weight' of the stage's auxiliary head"):
        guarded(mlp(), vector_batches(4), DGL(head=head), cuts=[4], guards=Guards())


def test_a_norm_too_large_for_its_type_is_told_apart() -> None:
    model = mlp(dtype=torch.float32)
    last: Any = model[6].bias
    last.register_hook(lambda gradient: gradient * 1e30)
    with pytest.raises(GuardError, match=r"every number is, but their norm is too large"):
        guarded(model, vector_batches(2, dtype=torch.float32), guards=Guards())


def test_warn_names_every_one_and_applies_it(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    spoil(model[0].weight, 1)
    trainer = guarded(model, vector_batches(3), guards=Guards(nonfinite="warn"))
    assert trainer.state_dict()["0.weight"].isnan().any()
    assert "update 1: the gradient of batch 1" in caplog.text
    assert "Applied all the same" in caplog.text


# ------------------------------------------------------------------------- holding back


def loop_that_guards(
    model: nn.Sequential, batches: list[Batch], *, back: Callable[[int], int | None]
) -> nn.Sequential:
    """Plain training that drops a bad step; ``back`` says to which version it returns, if any."""
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    past = []
    for number, (x, y) in enumerate(batches):
        past.append(copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        bad = any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        if not bad:
            optimizer.step()
        elif (version := back(number)) is not None:
            weights, state = copy.deepcopy(past[version])
            model.load_state_dict(weights)
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        schedule.step()
    return model


def exponential(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


# The loop below may skip its very first step, which schedulers take for a mistake.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("at", [0, 4, 8])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_without_lag_all_stages_skip_the_step(at: int, clip: float | None) -> None:
    """Only stage 0 has a bad gradient; the others must know."""
    model, plain = mlp(), mlp()
    spoil(model[0].weight, at)
    spoil(plain[0].weight, at)
    batches = vector_batches(9)
    guards = Guards(nonfinite="skip")
    trainer = guarded(model, batches, cuts=[2, 4], guards=guards, clip=clip, scheduler=exponential)
    if clip is None:
        expected = loop_that_guards(plain, batches, back=lambda _: None)
        assert_same_bits(trainer.state_dict(), expected.state_dict())
    for stage in range(3):
        assert trainer.updates.dropped(stage) == {at: "skipped"}
    assert all(value.isfinite().all() for value in trainer.state_dict().values())


class SkippingSGD(torch.optim.SGD):
    """Leaves out one step: what a stage that skips an update must do."""

    def __init__(self, params: Any, skipped: int | None) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self.skipped = skipped
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.steps != self.skipped:
            super().step()
        self.steps += 1


def test_with_lag_a_stage_skips_alone_and_the_lags_stay() -> None:
    batches = vector_batches(12)

    def sgd(skipped: int | None) -> Factory:
        made = iter((None, skipped, None))  # the stages in turn
        return lambda params: SkippingSGD(params, next(made))

    model = mlp()
    spoil(model[2].weight, 5)
    trainer = guarded(
        model, batches, StaleWeights(), sgd(None), cuts=[2, 4], guards=Guards(nonfinite="skip")
    )
    expected = guarded(mlp(), batches, StaleWeights(), sgd(5), cuts=[2, 4])
    assert_same_bits(trainer.state_dict(), expected.state_dict())
    assert [trainer.updates.dropped(stage) for stage in range(3)] == [{}, {5: "skipped"}, {}]
    for stage in range(3):
        assert trainer.ledger.lags(stage) == expected.ledger.lags(stage)
        assert trainer.updates.lags(stage) == expected.ledger.lags(stage)


@pytest.mark.parametrize(("at", "version"), [(1, 0), (4, 0), (5, 2), (6, 2), (7, 4)])
def test_roll_back_returns_to_the_older_of_two_copies(at: int, version: int) -> None:
    """Copies are made before updates 0, 2, 4 and 6, if these turn out to be finite."""
    batches = vector_batches(10)
    model, plain = mlp(), mlp()
    spoil(model[6].weight, at)
    spoil(plain[6].weight, at)
    expected = loop_that_guards(plain, batches, back=lambda _: version)
    guards = Guards(nonfinite="roll-back", every=2)
    trainer = guarded(model, batches, cuts=[4], guards=guards, scheduler=exponential)
    assert_same_bits(trainer.state_dict(), expected.state_dict())
    assert trainer.updates.dropped(0) == trainer.updates.dropped(1) == {at: "rolled back"}


def test_a_second_roll_back_trusts_no_copy_that_a_first_one_followed() -> None:
    """The copy before update 4 may be what led to the first: both return to the one before 2."""
    model, plain = mlp(), mlp()
    for network in (model, plain):
        spoil(network[6].weight, 5)
        spoil(network[6].weight, 7)
    expected = loop_that_guards(plain, vector_batches(10), back=lambda _: 2)
    guards = Guards(nonfinite="roll-back", every=2)
    trainer = guarded(model, vector_batches(10), guards=guards, scheduler=exponential)
    assert_same_bits(trainer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("backward", ["stash", "current", "recompute"])
def test_roll_back_leaves_what_is_in_flight_its_weights(backward: Any) -> None:
    """Gradients of older forwards are met after it: any order between stages gives one result."""
    found = []
    for seed in range(4):
        model = mlp()
        spoil(model[2].weight, 7)
        trainer = offbeat.Trainer(
            model,
            loss=nn.functional.cross_entropy,
            optimizer=OPTIMIZERS["adamw"],
            method=StaleWeights(backward=backward),
            cuts=[2, 4],
            guards=Guards(nonfinite="roll-back", every=3),
        )
        interleave(trainer, seed)
        for x, y in vector_batches(14):
            trainer.step(x, y)
        trainer.flush()
        assert trainer.updates.dropped(1) == {7: "rolled back"}
        found.append(trainer.state_dict())
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("nonfinite", ["skip", "roll-back"])
@pytest.mark.parametrize("method", [Synchronous(), StaleWeights()], ids=["BP", "stale"])
def test_a_bad_batch_leaves_no_trace_in_running_statistics(
    method: Method, nonfinite: Any, every: int
) -> None:
    batches = with_nan(image_batches(10), 4)
    guards = Guards(nonfinite=nonfinite, every=every)
    trainer = guarded(cnn(), batches, method, stages=3, guards=guards)
    for name, value in trainer.state_dict().items():
        assert value.isfinite().all(), name
    assert math.isfinite(trainer.evaluate(image_batches(2)).loss)


def test_skipping_puts_statistics_back_to_the_last_that_were_finite() -> None:
    *good, bad = with_nan(image_batches(8), 7)
    guards = Guards(nonfinite="skip", every=5)
    trainer = trainer_for(cnn(), stages=3, guards=guards)
    for x, y in good:
        trainer.step(x, y)
    before = {name: w.clone() for name, w in trainer.state_dict().items() if "running" in name}
    trainer.step(*bad)
    after = trainer.state_dict()
    assert_same_bits({name: after[name] for name in before}, before)


class Tables(nn.Linear):
    """What models keep in buffers: a mask, a table, and a mean that begins to be written late."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool))
        self.register_buffer("table", torch.full((6,), -math.inf))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:  # so that no version counter tells, as codebooks often do
            self.mean.data.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x)


def test_skipping_copies_what_changes_and_nothing_else() -> None:
    trainer = trainer_for([Tables(), nn.Linear(6, 4).double()], guards=Guards(nonfinite="skip"))
    *good, bad = with_nan(vector_batches(8), 7)
    guard, held = trainer._engine.workers[0].guard, []
    for x, y in good:
        trainer.step(x, y)
        (copy_,) = guard._copies
        held.append([buffer.data_ptr() for buffer in copy_.buffers])
    tables, means = zip(*held, strict=True)  # not the mask, which is always finite
    assert len(set(tables)) == 1, "the table was copied again"
    assert len(set(means[:4])) == 1 and means[4] != means[3]
    before = trainer.state_dict()
    trainer.step(*bad)
    assert_same_bits(trainer.state_dict(), before)


def test_a_run_that_only_drops_ends() -> None:
    batches = [(x * math.nan, y) for x, y in vector_batches(5)]
    with pytest.raises(GuardError, match=r"3 updates in a row, up to update 2,.*\(patience=3\)"):
        guarded(mlp(), batches, guards=Guards(nonfinite="skip", patience=3))


def test_a_loaded_state_is_what_is_rolled_back_to() -> None:
    guards = Guards(nonfinite="roll-back", every=2)
    trainer = trainer_for(mlp(), cuts=[4], guards=guards)
    for x, y in vector_batches(4):
        trainer.step(x, y)
    other = mlp(seed=5).state_dict()
    trainer.load_state_dict(other)
    x, y = with_nan(vector_batches(1), 0)[0]
    trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), other)


# ------------------------------------------------------------------------- replicas, processes


def test_replicas_that_average_gradients_skip_together() -> None:
    x, y = with_nan(vector_batches(1), 0)[0]  # a nan in the first replica's rows
    trainer = trainer_for(
        mlp(), cuts=[4], replicas=2, averaging=AllReduce(), guards=Guards(nonfinite="skip")
    )
    before = trainer.state_dict()
    trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), before)
    assert all(trainer.updates.dropped(1, replica) == {0: "skipped"} for replica in range(2))


def test_replicas_that_step_alone_skip_alone() -> None:
    trainer = trainer_for(mlp(), replicas=2, averaging=LocalSGD(4), guards=Guards(nonfinite="skip"))
    for x, y in with_nan(vector_batches(6), 2):
        trainer.step(x, y)
    assert trainer.updates.dropped(0, 0) == {2: "skipped"}
    assert trainer.updates.dropped(0, 1) == {}
    assert all(value.isfinite().all() for value in trainer.state_dict().values())


@pytest.mark.parametrize("stages", [2, 3])
def test_processes_decide_as_one_process_does(stages: int) -> None:
    todo = [
        (method, Guards(nonfinite=nonfinite, every=2))
        for method in (Synchronous(), StaleWeights())
        for nonfinite in ("skip", "roll-back")
    ]
    by_rank = offbeat.launch(jobs.train_guarded, 2, todo, stages, timeout_s=100)
    alone = jobs.train_guarded(todo, stages)
    for ours in by_rank:
        for (state, readings), (expected, expected_readings) in zip(ours, alone, strict=True):
            assert_same_bits(state, expected)
            assert readings == expected_readings
            assert any(outcome != "applied" for *_, outcome, _ in readings)


def test_a_bad_loss_in_one_process_ends_all_with_its_name() -> None:
    with pytest.raises(GuardError, match=r"stage 1: the loss of batch 4 is nan"):
        offbeat.launch(jobs.train_guarded, 2, [(StaleWeights(), Guards())], timeout_s=100)


# ------------------------------------------------------------------------- monitors and bounds


def test_readings_have_the_norms_of_plain_training() -> None:
    batches = vector_batches(5)
    model = mlp()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    norms = {}
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms[number] = float(nn.utils.get_total_norm(gradients))
        optimizer.step()
    trainer = guarded(mlp(), batches, guards=Guards())
    assert trainer.updates.norms(0) == norms
    assert [reading.outcome for reading in trainer.updates] == ["applied"] * 5


def test_sparse_gradients_are_read_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4))
    batches = [(torch.randint(9, (6, 2)), torch.randint(4, (6,))) for _ in range(3)]
    trainer = guarded(model, batches, StaleWeights(), OPTIMIZERS["sgd"], cuts=[2], guards=Guards())
    assert all(0 < norm < 10 for norm in trainer.updates.norms(0).values())


def test_a_schedule_above_the_bound_is_refused_before_the_first_step() -> None:
    settings: dict[str, Any] = {"cuts": [2, 4], "guards": Guards(max_lag=3)}
    with pytest.raises(
        ConfigurationError,
        match=r"max_lag=3, and StaleWeights\(.*\) over 3 stages has lag 4 at stage 0.*max_lag=4",
    ):
        trainer_for(mlp(), StaleWeights(), **settings)
    trainer = trainer_for(mlp(), ADL(2), **settings)
    assert max(trainer.lags) == 2


def test_every_phase_is_held_to_the_bound() -> None:
    late = offbeat.Phases((Synchronous(), 3), (StaleWeights(), None))
    with pytest.raises(ConfigurationError, match=r"max_lag=0, and .* has lag 2 at stage 0"):
        trainer_for(mlp(), late, cuts=[4], guards=Guards(max_lag=0))


def test_a_lag_above_the_bound_is_caught_where_it_is_measured() -> None:
    stage = Stage(Network(0, nn.Linear(2, 2), seed=0, device=torch.device("cpu")))
    guard = Guard(Guards(max_lag=1), stage, Updates())
    stage.flights.take_off(Flight(batch=7, version=0))
    stage.flights.land(7)
    stage.version = 2
    with pytest.raises(GuardError, match=r"stage 0, update 2: a gradient of batch 7 is 2 updates"):
        guard.before_update(2, Norms(torch.zeros(1), []), [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nonfinite": "rollback"}, r"'rollback'. Did you mean 'roll-back'\? Known: warn, stop"),
        ({"max_lag": -1}, r"max_lag=-1: give a whole number of updates"),
        ({"max_lag": True}, r"max_lag=True"),
        ({"every": 0}, r"every=0: give a whole number of at least 1"),
        ({"patience": 1.5}, r"patience=1.5"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Guards(**settings)


def test_something_else_than_guards_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"guards='skip': give an object"):
        trainer_for(mlp(), guards="skip")


def test_updates_are_summed_up_by_stage() -> None:
    updates = Updates()
    for number, norms in enumerate([(3.0, 4.0), (0.5, math.nan), (6.0, 0.5)]):
        for stage, norm in enumerate(norms):
            outcome: Any = "applied" if math.isfinite(sum(norms)) else "skipped"
            updates.append(Update(stage, number, 2 - stage, norm, outcome))
    found = summed_up(updates, clip=4.5)
    assert found["0/0"] == {
        "updates": 3, "dropped": 1, "skipped": 1, "rolled_back": 0, "clipped": 1, "not_finite": 0,
        "median_norm": 3.0, "largest_norm": 6.0, "largest_lag": 2,
    }  # fmt: skip
    assert [found["0/1"][name] for name in ("clipped", "not_finite", "median_norm")] == [0, 1, 2.25]
    assert summed_up(updates, clip=4.5, by_model=True)["0/1"]["clipped"] == 2  # 5.0 and 6.02
    assert summed_up(updates)["0/0"]["clipped"] is None
    assert summed_up(Updates()) == {}


def test_the_command_line_sets_guards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(*words: str) -> int:
        words = ("train", "--max-steps", "6", "--method", "stale-weights", "--stages", "2", *words)
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, "--out", str(tmp_path / str(len(list(tmp_path.iterdir()))))])
        return int(ended.value.code or 0)

    assert train("--nonfinite", "skip", "--max-lag", "2") == 0
    summary = Run.load(tmp_path / "0").summary["guards"]
    assert {place: found["updates"] for place, found in summary.items()} == {"0/0": 6, "0/1": 6}
    assert summary["0/0"]["largest_lag"] == 2
    assert 0 < summary["0/1"]["median_norm"] <= summary["0/1"]["largest_norm"] < 100
    assert summary["0/1"]["clipped"] is None
    assert train("--max-lag", "1") == 2
    assert "max_lag=1, and StaleWeights" in capsys.readouterr().err
    assert train("--nonfinite", "panic") == 2
    assert "unknown policy nonfinite 'panic'" in capsys.readouterr().err
    assert train("--nonfinite", "stop", "--lr", "1e30") == 2
    assert "Error: stage 1: the loss of batch 1 is nan" in capsys.readouterr().err


def test_a_loss_of_a_part_is_named_as_one(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_for(mlp(), StaleWeights(accumulate=2), cuts=[4])
    for x, y in with_nan(vector_batches(3), 1):
        trainer.step(x, y)
    assert "the loss of micro-batch 2 is nan" in caplog.records[0].message
