"""What ``step`` promises, and what it says when something is wrong."""

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
    mlp,
    plain_loop,
    trained,
    trainer_for,
    vector_batches,
)
from offbeat.errors import BatchError, ConfigurationError, StageError, StoppedError
from offbeat.methods import (
    ADL,
    DDG,
    DGL,
    DSP,
    FDG,
    METHODS,
    FeaturesReplay,
    GPipe,
    Method,
    Phases,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)

ALL = [method() for method in METHODS]
ids = [method.name for method in ALL]


# ------------------------------------------------------------------ what step promises

DELAYS: dict[Method, int] = {
    Synchronous(): 0, PipeDream(): 2, PipeDream2BW(): 1, DDG(): 2, FeaturesReplay(): 2, FDG(): 4,
    StaleWeights(): 4, ADL(): 1, ADL(3): 2, DSP(): 4, DSP(hop=2): 8, DGL(): 0,
}  # fmt: skip
"""By how many batches losses come later with three stages, counted by hand."""


@pytest.mark.parametrize("method", [*ALL, DSP(hop=2), ADL(3)], ids=[*ids, "dsp-2", "adl-3"])
def test_step_returns_the_loss_of_a_fixed_batch(method: Method) -> None:
    """The loss of batch n - ceil(m_0 / M), None before; flush hands out the rest."""
    trainer = trainer_for(mlp(), method, stages=3)
    batches = vector_batches(7)
    returned = [trainer.step(x, y) for x, y in batches]
    expected_delay = method.lags(3)[0]
    assert DELAYS.get(method, expected_delay) == expected_delay
    assert [loss is None for loss in returned] == [n < expected_delay for n in range(7)]
    losses = [loss for loss in returned if loss is not None] + trainer.flush()
    measured = trainer.ledger.losses(stage=2)
    parts = trainer._pipeline.schedule.micro_batches
    for n, loss in enumerate(losses):
        mean = sum(measured[n * parts + j] for j in range(parts)) / parts
        if 6 % parts == 0:
            assert float(loss) == pytest.approx(mean, rel=1e-12)
        assert loss.shape == ()
        assert not loss.requires_grad
    assert len(losses) == 7


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_measured_lags_are_the_declared_ones(method: Method) -> None:
    trainer = trainer_for(mlp(), method, stages=4)
    for x, y in vector_batches(16):
        trainer.step(x, y)
    for stage, declared in enumerate(trainer.lags):
        measured = trainer.ledger.lags(stage)
        steady = [lag for batch, lag in measured.items() if batch >= len(measured) // 2]
        assert max(steady) == declared
        assert measured[0] == 0
    trainer.flush()
    for stage, table in enumerate(method.schedule(4).table(16).lags()):
        assert trainer.ledger.lags(stage) == table


def test_after_step_n_a_stage_has_applied_n_minus_its_lag() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), cuts=[2, 4])
    for n, (x, y) in enumerate(vector_batches(8)):
        trainer.step(x, y)
        versions = [worker.stage.version for worker in trainer._engine.workers]
        assert versions == [max(0, n + 1 - 4), max(0, n + 1 - 2), n + 1]


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_evaluation_and_reading_change_nothing(method: Method) -> None:
    batches = image_batches(6)
    quiet = trained(cnn(), batches, method, cuts=[3, 5, 7])
    trainer = trainer_for(cnn(), method, cuts=[3, 5, 7])
    trainer.model[1].eval()  # type: ignore[index]
    trainer.model[1].train()  # type: ignore[index]
    for x, y in batches:
        trainer.step(x, y)
        torch.rand(3)
        trainer.evaluate(batches)
        trainer.state_dict()
        trainer.memory()
        assert trainer.model.training
    trainer.flush()
    assert_same_bits(trainer.state_dict(), quiet.state_dict())


def test_evaluate_sees_the_newest_weights_of_every_stage_undrained() -> None:
    trainer = trainer_for(cnn(), PipeDream(), cuts=[3, 5])
    batches = image_batches(5)
    for x, y in batches:
        trainer.step(x, y)
    model = cnn()
    model.load_state_dict(trainer.state_dict())
    model.eval()
    with torch.no_grad():
        x, y = batches[0]
        output = model(x)
    found = trainer.evaluate([(x, y)])
    assert found.loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-6)
    assert found.accuracy == pytest.approx((output.argmax(1) == y).float().mean().item())
    assert found.rows == 6


def test_evaluate_keeps_modules_that_were_in_evaluation_mode() -> None:
    trainer = trainer_for(cnn(), cuts=[3])
    trainer.model[1].eval()  # type: ignore[index]
    trainer.evaluate(image_batches(1))
    modes = [module.training for module in trainer.model.children()]
    assert modes == [True, False, *[True] * 8]


def test_evaluate_without_classes_has_no_accuracy() -> None:
    trainer = trainer_for(mlp(), loss=nn.functional.mse_loss)
    x = vector_batches(1)[0][0]
    assert trainer.evaluate([(x, torch.zeros(6, 4, dtype=torch.float64))]).accuracy is None
    with pytest.raises(BatchError, match="an empty loader"):
        trainer.evaluate([])


# ------------------------------------------------------------------ flush, phases


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_stepping_again_after_a_flush_fills_anew(method: Method) -> None:
    trainer = trainer_for(mlp(), method, stages=3)
    batches = vector_batches(6)
    for x, y in batches[:3]:
        trainer.step(x, y)
    first = trainer.flush()
    assert trainer.flush() == []
    assert len(first) == min(3, trainer._pipeline.schedule.loss_delay)
    losses = [trainer.step(x, y) for x, y in batches[3:]]
    assert [loss is None for loss in losses] == [
        n < trainer._pipeline.schedule.loss_delay for n in range(3)
    ]
    trainer.flush()
    assert all(worker.stage.version == 6 for worker in trainer._engine.workers)
    for stage in range(3):
        lags = trainer.ledger.lags(stage)
        parts = trainer._pipeline.schedule.micro_batches
        assert len(lags) == 6 * parts
        assert [lags[i] for i in range(3 * parts)] == [
            lags[3 * parts + i] for i in range(3 * parts)
        ]


def test_flushing_after_every_step_is_plain_training() -> None:
    batches = image_batches(5)
    expected, _ = plain_loop(cnn(), batches)
    for method in (StaleWeights(), PipeDream(), DSP(), PipeDream2BW(accumulate=1)):
        stages = 1 if isinstance(method, PipeDream2BW) else 3
        trainer = trainer_for(cnn(), method, cuts=[3, 5] if stages == 3 else [])
        for x, y in batches:
            trainer.step(x, y)
            trainer.flush()
        assert_same_bits(trainer.state_dict(), expected.state_dict())


def test_fewer_batches_than_stages() -> None:
    for method in ALL:
        trainer = trainer_for(mlp(), method, stages=4)
        trainer.step(*vector_batches(1)[0])
        trainer.flush()
        assert [worker.stage.version for worker in trainer._engine.workers] == [1, 1, 1, 1]


def test_flush_before_the_first_step_does_nothing() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), stages=3)
    assert trainer.flush() == []
    assert_same_bits(trainer.state_dict(), mlp().state_dict())


def test_hybrid_is_one_method_a_drain_and_the_other() -> None:
    """Momentum, versions and schedules carry on; only the order of work changes."""

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    batches = image_batches(9)
    hybrid = Phases((StaleWeights(), 5), (Synchronous(), None))
    trainer = trainer_for(cnn(), hybrid, cuts=[3, 5], scheduler=scheduler)
    by_hand = trainer_for(cnn(), StaleWeights(), cuts=[3, 5], scheduler=scheduler)
    for x, y in batches[:5]:
        trainer.step(x, y)
        by_hand.step(x, y)
    assert trainer.lags == (4, 2, 0)
    by_hand.flush()
    optimizers = [worker.stage.optimizers[0] for worker in by_hand._engine.workers]
    schedulers = [worker.stage.schedulers[0] for worker in by_hand._engine.workers]
    for n, (x, y) in enumerate(batches[5:]):
        loss = nn.functional.cross_entropy(by_hand.model(x), y)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert torch.equal(trainer.step(x, y), loss.detach()), n  # type: ignore[arg-type]
    assert trainer.lags == (0, 0, 0)
    assert trainer.method == Synchronous()
    assert_same_bits(trainer.state_dict(), by_hand.model.state_dict())


def test_phases_may_change_micro_batches_rules_and_losses() -> None:
    phases = Phases((Synchronous(), 2), (DGL(), 3), (PipeDream2BW(), 4), (ADL(2), 3), (DSP(), None))
    trainer = trainer_for(cnn(), phases, stages=3)
    for x, y in image_batches(15):
        trainer.step(x, y)
    trainer.flush()
    assert [worker.stage.version for worker in trainer._engine.workers] == [15, 15, 15]
    assert all(torch.isfinite(value).all() for value in trainer.state_dict().values())


# ------------------------------------------------------------------ state


def test_state_dict_is_the_unsplit_model_s_and_nothing_else() -> None:
    model = cnn()
    for method in (StaleWeights(), DGL(), PipeDream()):
        trainer = trained(model, image_batches(4), method, cuts=[3, 5])
        state = trainer.state_dict()
        assert list(state) == list(model.state_dict())
        fresh = cnn(seed=1)
        fresh.load_state_dict(state)
        assert_same_bits(dict(fresh.state_dict()), state)
    stages = [cnn()[:3], cnn()[3:5], cnn()[5:]]
    assert list(trainer_for(stages).state_dict()) == list(nn.Sequential(*stages).state_dict())


def test_state_dict_is_a_snapshot() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), cuts=[2, 4])
    x, y = vector_batches(1)[0]
    trainer.step(x, y)
    state = trainer.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(5):
        trainer.step(x, y)
    assert_same_bits(state, kept)


def test_load_state_dict_waits_for_a_flush() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), cuts=[2, 4])
    state = trainer.state_dict()
    trainer.step(*vector_batches(1)[0])
    with pytest.raises(ConfigurationError, match="1 batches in flight.*flush"):
        trainer.load_state_dict(state)
    trainer.flush()
    trainer.load_state_dict(state)
    assert_same_bits(trainer.state_dict(), state)


# ------------------------------------------------------------------ cutting


def test_stages_are_cut_where_the_counted_cost_balances() -> None:
    model = nn.Sequential(
        nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100),
        nn.ReLU(), nn.Linear(100, 4),
    )  # fmt: skip
    trainer = trainer_for(model, StaleWeights(), stages=2)
    assert trainer.cuts is None
    trainer.step(torch.randn(8, 6), torch.randint(4, (8,)))
    # 1200 + 100 + 20000 against 100 + 20000 + 100 + 800 operations a row, biases aside
    assert trainer.cuts == (3,)


def test_cutting_leaves_buffers_and_generators_untouched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    batches = vector_batches(3, dtype=torch.float32)
    kept = [x.clone() for x, _ in batches]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    automatic = trained(model, batches, Synchronous(), stages=2, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for (x, _), y in zip(batches, kept, strict=True))
    assert automatic.cuts is not None
    given = trained(model, batches, Synchronous(), cuts=list(automatic.cuts), seed=4)
    assert_same_bits(automatic.state_dict(), given.state_dict())


def test_ppv_counts_weighted_layers_as_the_paper_does() -> None:
    assert trainer_for(cnn(), ppv=(1,)).cuts == (3,)  # conv | bn, relu stay with it
    assert trainer_for(cnn(), ppv=(2, 3)).cuts == (5, 9)
    with pytest.raises(ConfigurationError, match=r"4 conv and linear layers.* after 1, 2, 3\."):
        trainer_for(cnn(), ppv=(4,))


# ------------------------------------------------------------------ optimizers


def test_a_factory_may_return_several_optimizers() -> None:
    """Muon takes matrices only; the rest goes to AdamW."""

    def optimizer(params: Any) -> Any:
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]

    batches = vector_batches(4, dtype=torch.float32)
    reference = mlp(dtype=torch.float32)
    optimizers = optimizer(list(reference.parameters()))
    for x, y in batches:
        nn.functional.cross_entropy(reference(x), y).backward()
        for made in optimizers:
            made.step()
            made.zero_grad()
    trainer = trained(mlp(dtype=torch.float32), batches, Synchronous(), optimizer, cuts=[2, 4])
    assert_same_bits(trainer.state_dict(), reference.state_dict())
    trained(mlp(dtype=torch.float32), batches, StaleWeights(), optimizer, cuts=[2, 4])


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_any_torch_optimizer(name: str) -> None:
    factory = getattr(torch.optim, name)
    batches = vector_batches(4)
    expected, _ = plain_loop(mlp(), batches, factory)
    for method in (Synchronous(), StaleWeights(), PipeDream()):
        trainer = trained(mlp(), batches, method, factory, cuts=[2, 4])
        if method == Synchronous():
            assert_same_bits(trainer.state_dict(), expected.state_dict())


# ------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"method": "stale-wieghts"},
            "unknown method 'stale-wieghts'. Did you mean 'stale-weights'",
        ),
        ({"method": 3}, "method=3: give an object such as StaleWeights"),
        ({"stages": 8}, "8 stages, but the model has 7 layers.*at most 7"),
        ({"stages": 0}, "stages=0: give a whole number of at least 1"),
        ({"cuts": [4, 2]}, r"cuts=\[4, 2\].*they rise and lie between 1 and 6"),
        ({"cuts": [0]}, r"cuts=\[0\].*between 1 and 6"),
        ({"cuts": [7]}, r"cuts=\[7\].*between 1 and 6"),
        ({"cuts": [2], "stages": 3}, "stages=3 and cuts=.* disagree: 1 cuts make 2 stages"),
        ({"cuts": [2], "ppv": (2,)}, "cuts and ppv both say where to cut"),
        ({"method": DSP(lag=(2, 0)), "stages": 3}, r"lag=\(2, 0\)\) has 2 entries for 3 stages"),
        ({"method": DSP(lag=(4, 2, 0), hop=(3, 1)), "stages": 3}, r"Lower hop\[0\]"),
        ({"method": DSP(hop=(1, 1, 1)), "stages": 3}, "has 3 entries for 3 stages"),
        ({"method": PipeDream2BW(accumulate=2), "stages": 3}, "Give accumulate >= 3"),
        ({"clip": -1.0}, "clip=-1.0: give a positive norm"),
        ({"autocast": torch.float16}, "only torch.bfloat16"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "optimizer is a SGD: every stage makes"),
        ({"scheduler": 3}, "scheduler is a int: every stage makes its own"),
        ({"loss": 3}, "loss=3: give a function"),
        ({"loss": nn.Linear(4, 1)}, "the loss has parameters of its own"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS evaluates the loss again"),
        ({"optimizer": lambda p: "sgd"}, "returned a str|two optimizers|returned"),
        (
            {"optimizer": lambda p: [torch.optim.SGD(p), torch.optim.SGD(p)]},
            "parameters are in two optimizers",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "returned a ReduceLROnPlateau.*without a metric",
        ),
    ],
)
def test_bad_arguments_get_words(settings: dict[str, Any], words: str) -> None:
    arguments = {"loss": nn.functional.cross_entropy, "optimizer": OPTIMIZERS["sgd"], **settings}
    with pytest.raises(ConfigurationError, match=words):
        offbeat.Trainer(mlp(), **arguments)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DSP(lag=(1, 2)), r"must not increase.*Try lag=\(2, 1\)"),
        (lambda: DSP(lag=(-1, 0)), "give integers from 0 to"),
        (lambda: DSP(hop=-1), "give an integer from 0 to"),
        (lambda: FDG_beta(2.0), "0 < beta <= 1"),
        (lambda: ADL(0), "accumulate=0: give a whole number of at least 1"),
        (lambda: ADL(2, reduction="max"), "unknown reduction 'max'"),  # type: ignore[arg-type]
        (lambda: StaleWeights(backward="stsh"), "Did you mean 'stash'"),  # type: ignore[arg-type]
        (lambda: GPipe(0), "micro_batches=0"),
        (lambda: Phases(), "Phases.* is empty"),
        (lambda: Phases((Synchronous(), 5)), "the last phase.*give None instead of 5"),
        (lambda: Phases((Synchronous(), None), (DSP(), None)), "runs for None updates"),
        (lambda: Phases(Synchronous()), "is not a .method, updates. pair"),  # type: ignore[arg-type]
        (
            lambda: Phases((Phases((DSP(), None)), 3), (DSP(), None)),
            "Phases inside Phases: write the inner pairs",
        ),
        (lambda: offbeat.methods.method_named("gpipe", beta=1), "gpipe has no setting 'beta'"),
        (
            lambda: offbeat.methods.method_named("adl:accumulate=2"),
            "Here they are arguments: ADL\\(accumulate=2\\)",
        ),
    ],
)
def test_bad_methods_get_words(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def FDG_beta(beta: float) -> Method:
    return offbeat.FDG(beta=beta)


def test_the_optimizer_of_a_stage_holds_that_stage_s_parameters() -> None:
    model = mlp()
    with pytest.raises(ConfigurationError, match="holds .* parameters of other stages"):
        offbeat.Trainer(
            model,
            loss=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(model.parameters(), lr=0.1),
            cuts=[2],
        )


def test_a_parameter_of_two_stages_trains_as_in_one_piece() -> None:
    shared, last = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()
    whole = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, last))
    batches = vector_batches(3)
    expected, losses = plain_loop(whole, batches)
    for model in ([shared, nn.ReLU(), nn.Sequential(shared, last)], whole):
        settings: dict[str, Any] = {"stages": 3} if model is whole else {}
        trainer = trainer_for(copy.deepcopy(model), **settings)
        assert [float(trainer.step(x, y)) for x, y in batches] == losses  # type: ignore[arg-type]
        assert_same_bits(trainer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("settings", [{"stages": 2}, {"cuts": [2]}, {"ppv": (1,)}])
def test_a_module_used_twice_runs_twice(settings: dict[str, Any]) -> None:
    """children() lists a repeated module once: the second use of an activation was lost."""
    act = nn.Tanh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 4), act).double()
    batches = vector_batches(3)
    expected, losses = plain_loop(model, batches)
    trainer = trainer_for(model, **settings)
    assert [float(trainer.step(x, y)) for x, y in batches] == losses  # type: ignore[arg-type]
    assert_same_bits(trainer.state_dict(), expected.state_dict())


def test_a_layer_used_twice_may_be_used_by_two_stages() -> None:
    twice = nn.Linear(6, 6).double()
    model = nn.Sequential(twice, nn.ReLU(), twice)
    batches = vector_batches(3)
    expected, losses = plain_loop(model, batches)
    trainer = trainer_for(model, cuts=[1])
    assert [float(trainer.step(x, y)) for x, y in batches] == losses  # type: ignore[arg-type]
    assert_same_bits(trainer.state_dict(), expected.state_dict())


def test_an_asynchronous_method_without_stages_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="StaleWeights over one stage is plain training"):
        trainer_for(mlp(), StaleWeights())


def test_one_batch_is_not_a_loader() -> None:
    x, y = vector_batches(1)[0]
    with pytest.raises(BatchError, match=r"give \[\(x, y\)\]"):
        trainer_for(mlp()).evaluate((x, y))


def test_losses_owed_at_a_change_of_phase_come_with_the_next_flush() -> None:
    hybrid = Phases((StaleWeights(), 5), (Synchronous(), None))
    trainer = trainer_for(mlp(), hybrid, cuts=[2, 4])
    returned = [trainer.step(x, y) for x, y in vector_batches(8)]
    assert [loss is None for loss in returned] == [True] * 4 + [False] * 4
    owed = trainer.flush()
    measured = list(trainer.ledger.losses(2).values())
    handed = [float(loss) for loss in returned if loss is not None]
    assert [handed[0], *map(float, owed), *handed[1:]] == pytest.approx(measured, rel=1e-12)


def test_stages_must_fit_the_model() -> None:
    with pytest.raises(ConfigurationError, match="2 stages, but this Linear has 0 modules"):
        trainer_for(nn.Linear(8, 2), stages=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cut already: leave out cuts"):
        trainer_for([nn.Linear(2, 2)], cuts=[1])
    with pytest.raises(ConfigurationError, match="stages=3, but the list has 1"):
        trainer_for([nn.Linear(2, 2)], stages=3)
    with pytest.raises(ConfigurationError, match="an empty list of stages"):
        trainer_for([])


def test_a_batch_on_another_device_is_refused_before_it_starts() -> None:
    trainer = trainer_for(mlp(), StaleWeights(), stages=2)
    x, y = vector_batches(1)[0]
    with pytest.raises(BatchError, match="the batch is on meta, the model on cpu"):
        trainer.step(x.to("meta"), y)
    trainer.step(x, y)
    trainer = trainer_for([nn.Linear(6, 4), nn.Linear(4, 4, device="meta")])
    with pytest.raises(ConfigurationError, match="on meta, and nothing says what its weights are"):
        trainer.step(x.float(), y)


def test_a_bad_batch_leaves_the_run_intact() -> None:
    batches = vector_batches(5)
    trainer = trainer_for(mlp(), ADL(4), cuts=[2, 4])
    for x, y in batches:
        trainer.step(x, y)
        with pytest.raises(BatchError, match="a batch of 3 rows cannot make 4 micro-batches"):
            trainer.step(x[:3], y[:3])
        with pytest.raises(BatchError, match="x has 6 rows and another tensor of the batch 5"):
            trainer.step(x, y[:5])
        with pytest.raises(BatchError, match="without a tensor"):
            trainer.step(None, y)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(BatchError, match="inside torch.autocast"),
        ):
            trainer.step(x, y)
    trainer.flush()
    assert_same_bits(
        trainer.state_dict(), trained(mlp(), batches, ADL(4), cuts=[2, 4]).state_dict()
    )


class FailsOnce(nn.Module):
    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the disk is on fire")
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("method", [Synchronous(), StaleWeights(), PipeDream(), GPipe(2)])
def test_an_error_in_a_forward_leaves_all_weights_as_they_were(method: Method, where: int) -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)]
    stages[where] = FailsOnce(5)
    trainer = trainer_for(stages, method)
    x, y = vector_batches(1, dtype=torch.float32)[0]
    before = trainer.state_dict()
    with pytest.raises(RuntimeError, match="on fire"):
        for _ in range(6):
            before = trainer.state_dict()
            trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), before)
    with pytest.raises(StoppedError, match="ended at an earlier error .RuntimeError: the disk"):
        trainer.step(x, y)
    with pytest.raises(StoppedError):
        trainer.flush()
    trainer.load_state_dict(before)
    for _ in range(5):
        trainer.step(x, y)
    trainer.flush()
    assert len({worker.stage.version for worker in trainer._engine.workers}) == 1


def test_a_run_goes_on_after_an_error_that_some_stages_were_past() -> None:
    """At a change of phase all stages must have made the same number of updates."""
    batches = vector_batches(14)
    method = Phases((StaleWeights(), 6), (Synchronous(), None))
    trainer = trainer_for(mlp(), method, cuts=[2, 4], clip=1.0)
    for x, y in batches[:4]:
        trainer.step(x, y)
    good = trainer.state_dict()
    with pytest.raises(IndexError):
        trainer.step(x, y + 100)
    trainer.load_state_dict(good)
    for x, y in batches[4:]:
        trainer.step(x, y)
    assert trainer.method == Synchronous()


@pytest.mark.parametrize("rule", ["stash", "current", "recompute"])
def test_a_loader_that_fills_the_same_memory_again_is_found_out(rule: Any) -> None:
    trainer = trainer_for(mlp(), DSP(backward=rule), cuts=[2, 4])
    memory = torch.empty(6, 6, dtype=torch.float64)
    with pytest.raises(StageError, match="give every batch memory of its own"):
        for x, y in vector_batches(6):
            trainer.step(memory.copy_(x), y)


@pytest.mark.parametrize("loader", [[], [(torch.zeros(2, 5), torch.zeros(2))], [1]])
def test_an_evaluation_that_fails_leaves_the_run_intact(loader: Any) -> None:
    batches = vector_batches(6)
    trainer = trainer_for(mlp(), StaleWeights(), cuts=[2, 4])
    for x, y in batches:
        with pytest.raises((BatchError, RuntimeError, TypeError)):
            trainer.evaluate(loader)
        trainer.step(x, y)
    trainer.flush()
    expected = trained(mlp(), batches, StaleWeights(), cuts=[2, 4])
    assert_same_bits(trainer.state_dict(), expected.state_dict())


def test_evaluation_counts_rows_and_classes_as_they_are() -> None:
    x, y = torch.randn(8, 3), torch.randint(2, (8,))

    def scored(model: nn.Module, loss: Any, **settings: Any) -> offbeat.Evaluation:
        return trainer_for([model], loss=loss, **settings).evaluate([(x, y), (x[:2], y[:2])])

    def of_one_number(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output[:, 0], target.float())

    assert scored(nn.Linear(3, 1), of_one_number).accuracy is None  # zero parts the two classes

    class WithLossOfItsOwn(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"aux": self.weight.sum(), "logits": super().forward(x)}

    def of_logits(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output["logits"], target)

    assert scored(WithLossOfItsOwn(3, 2), of_logits).rows == 10

    model = nn.Linear(3, 2)
    found = scored(model, nn.functional.cross_entropy, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [nn.functional.cross_entropy(model(x[:n]), y[:n]).item() for n in (8, 2)]
    assert found.loss == pytest.approx((8 * losses[0] + 2 * losses[1]) / 10, abs=1e-7)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x) + 1  # type: ignore[no-any-return,no-untyped-call]


def test_a_sequential_with_a_forward_of_its_own_is_cut_by_that() -> None:
    model = Doubled(*mlp(dtype=torch.float32))
    batches = vector_batches(4, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)
    assert_same_bits(trained(model, batches, stages=2).state_dict(), expected.state_dict())


def test_hooks_of_a_model_that_is_cut_are_pointed_out() -> None:
    model = mlp()
    model.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks of the model itself are not called"):
        trainer_for(model, stages=2)


def test_what_is_trained_is_settled_when_the_trainer_begins() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    trainer = trainer_for(model, cuts=[2, 4])
    (x, y), *_ = vector_batches(1)
    trainer.step(x, y)
    trainer.model[0].requires_grad_(True)  # type: ignore[index]
    with pytest.raises(ConfigurationError, match=r"0\.weight was frozen when this trainer began"):
        trainer.step(x, y)
    trainer.model[0].requires_grad_(False)  # type: ignore[index]
    trainer.step(x, y)


@pytest.mark.parametrize("method", [Synchronous(), DSP(backward="recompute"), StaleWeights()])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_begins_to_train_later_does_so_everywhere(
    method: Method, replicas: int
) -> None:
    batches = image_batches(7)
    trainer = trainer_for(cnn().eval(), method, stages=3, replicas=replicas)
    for x, y in batches[:2]:
        trainer.step(x, y)
    trainer.flush()
    trainer.model.train()
    for x, y in batches[2:]:
        trainer.step(x, y)
    trainer.flush()
    for model in trainer._pipeline.models:
        counts = [m.num_batches_tracked for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert counts == [5, 5]


class Named(nn.Module):
    """A model whose batches are dicts of its arguments, as Hugging Face's are."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.inlet(ids) if mask is None else self.inlet(ids) * mask
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def test_a_batch_of_named_arguments_fits_one_stage_as_it_does_several() -> None:
    torch.manual_seed(0)
    model: Any = Named()
    batches: Any = [
        ({"ids": x, "mask": (x[:, :1] > 0).float()}, y)
        for x, y in vector_batches(4, dtype=torch.float32)
    ]
    one, several = (trained(model, batches, stages=stages) for stages in (1, 3))
    assert_same_bits(one.state_dict(), several.state_dict())
    assert one.evaluate(batches) == several.evaluate(batches)


def test_dgl_says_when_it_needs_a_head() -> None:
    stages = [nn.Embedding(9, 6), nn.Sequential(nn.Flatten(), nn.Linear(18, 4))]
    with pytest.raises(
        ConfigurationError, match=r"passes on a tensor of shape \(5, 3, 6\).*DGL\(head"
    ):
        trainer_for(stages, DGL()).step(torch.randint(9, (5, 3)), torch.randint(4, (5,)))
    with pytest.raises(ConfigurationError, match="returned a str: it must return an nn.Module"):
        trainer_for(stages, DGL(head=lambda a, o: "head")).step(
            torch.randint(9, (5, 3)), torch.randint(4, (5,))
        )


def test_dgl_heads_train_and_stay_out_of_the_model() -> None:
    trainer = trainer_for(cnn(), DGL(), stages=3)
    losses: list[float] = []
    x, y = image_batches(1, rows=16)[0]
    for _ in range(30):
        trainer.step(x, y)
    for stage in range(3):
        losses = list(trainer.ledger.losses(stage).values())
        assert losses[-1] < 0.5 * losses[0]
    assert list(trainer.state_dict()) == list(cnn().state_dict())


def test_a_frozen_stage_needs_no_optimizer() -> None:
    """A factory that leaves out what is frozen would be given an empty list by PyTorch's rules."""
    batches = vector_batches(5)

    def unfrozen(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)

    model = mlp()
    model[0].requires_grad_(False)
    expected, _ = plain_loop(model, batches, unfrozen)
    trainer = trained(model, batches, optimizer=unfrozen, cuts=[1, 4])
    assert_same_bits(trainer.state_dict(), expected.state_dict())
