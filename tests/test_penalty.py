"""``penalty=``: a loss on weights, computed by each stage at the weights its backward sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import jobs
import offbeat
import oracles
from helpers import (
    OPTIMIZERS,
    Batch,
    Factory,
    assert_same_bits,
    mlp,
    trained,
    trainer_for,
    vector_batches,
)
from offbeat.averaging import AllReduce, DaSGD
from offbeat.errors import CheckpointError, ConfigurationError, StageError
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    GPipe,
    Method,
    OneFOneB,
    Phases,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)

Named = Iterable[tuple[str, Tensor]]


def decay(named: Named) -> Any:
    """On matrices alone: a stage may have nothing of it."""
    return 3e-2 * sum(p.square().sum() for n, p in named if p.ndim > 1)


def lasso(named: Named) -> Any:
    return 1e-2 * sum(p.abs().sum() for n, p in named if "bias" not in n)


def groups(named: Named) -> Any:
    """Keeps the norm of every row, which is made of weights alone."""
    return 1e-2 * sum(p.norm(dim=-1).sum() for _, p in named)


PENALTIES: dict[str, Callable[[Named], Any]] = {"decay": decay, "lasso": lasso, "groups": groups}


def plain(
    model: nn.Sequential,
    batches: Sequence[Batch],
    penalty: Callable[[Named], Any],
    parts: int = 1,
    **how: Any,
) -> nn.Sequential:
    """The loop that an engineer writes: the first part of a batch brings the penalty."""
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        pieces = zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
        for number, (xs, ys) in enumerate(pieces):
            value = cross_entropy(model(xs), ys)
            value = value if parts == 1 else value * (len(xs) / len(x))
            if number == 0:
                value = value + penalty(model.named_parameters())
            value.backward()
        if "clip" in how:
            nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        optimizer.step()
    return model


def shared() -> nn.Sequential:
    """One layer is used twice in a stage: autograd adds three gradients, in its own order."""
    torch.manual_seed(0)
    twice = nn.Linear(8, 8)
    layers = nn.Linear(6, 8), nn.Tanh(), twice, nn.Tanh(), twice, nn.ReLU(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(
    ("method", "parts", "how"),
    [
        (Synchronous(), 1, {}),
        (Synchronous(), 1, {"clip": 0.05}),
        (GPipe(3), 3, {}),
        (OneFOneB(2), 2, {}),
    ],
    ids=str,
)
def test_without_lag_the_bits_are_those_of_a_plain_loop(
    method: Method, parts: int, how: dict[str, Any], penalty: str
) -> None:
    for model, cuts in ((mlp(), [2, 4]), (shared(), [1, 5])):
        batches = vector_batches(6, rows=7)
        expected = plain(model, batches, PENALTIES[penalty], parts, **how)
        without = plain(model, batches, lambda named: 0.0, parts, **how)
        trainer = trained(
            model, batches, method, OPTIMIZERS["adamw"], cuts=cuts, penalty=PENALTIES[penalty],
            **how,
        )  # fmt: skip
        assert_same_bits(trainer.state_dict(), expected.state_dict())
        with pytest.raises(AssertionError):
            assert_same_bits(without.state_dict(), expected.state_dict())


def test_the_losses_that_are_told_are_without_it() -> None:
    x, y = vector_batches(1)[0]
    model = mlp()
    trainer = trainer_for(model, penalty=decay, stages=2)
    expected = cross_entropy(model(x), y).item()
    assert trainer.evaluate([(x, y)]).loss == pytest.approx(expected, abs=1e-12)
    loss = trainer.step(x, y)
    assert loss is not None
    assert float(loss) == expected


# ------------------------------------------------------------------ with lag


class Decayed:
    """An optimizer that adds the gradient of ``3e-2 * W ** 2`` at an older version by hand."""

    def __init__(self, params: list[Tensor], make: Factory, read: Callable[[int], int]) -> None:
        self.params, self.inner, self.read = params, make(params), read
        self.versions = [[p.detach().clone() for p in params]]

    def step(self) -> None:
        read = self.versions[self.read(len(self.versions) - 1)]
        for p, w in zip(self.params, read, strict=True):
            if p.ndim > 1:
                assert p.grad is not None
                p.grad = p.grad + 6e-2 * w
        self.inner.step()
        self.versions.append([p.detach().clone() for p in self.params])

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def one_way(stages: int) -> list[int]:
    return [stages - 1 - k for k in range(stages)]


def both_ways(stages: int) -> list[int]:
    return [2 * lag for lag in one_way(stages)]


def at_forward(u: int, lag: int, parts: int) -> int:
    return max(0, u * parts - lag) // parts


def newest(u: int, lag: int, parts: int) -> int:
    return u


def one_before(u: int, lag: int, parts: int) -> int:
    return max(0, u - 1)


LAGGING: dict[str, tuple[Method, Any, Any, Any, int]] = {
    "pipedream": (PipeDream(), oracles.stash, one_way, at_forward, 1),
    "pipedream, parts": (PipeDream(accumulate=2), oracles.stash, one_way, at_forward, 2),
    "adl": (ADL(3), oracles.stash, both_ways, at_forward, 3),
    "stale-weights": (StaleWeights(), oracles.current, both_ways, newest, 1),
    "stale-weights, parts": (StaleWeights(accumulate=2), oracles.current, both_ways, newest, 2),
    "recompute": (StaleWeights(backward="recompute"), oracles.recompute, both_ways, newest, 1),
    "dsp": (DSP(), oracles.recompute, both_ways, newest, 1),
    "2bw": (PipeDream2BW(), oracles.two_buffered, None, one_before, 3),
}


@pytest.mark.parametrize("name", LAGGING)
def test_with_lag_it_sees_what_the_backward_differentiates(name: str) -> None:
    method, oracle, lags_of, read, parts = LAGGING[name]
    network, inputs, classes = oracles.random_network(3, 3)
    batches = oracles.random_batches(3, 9, 7, inputs, classes, last_rows=5)
    lags = [0] * 3 if lags_of is None else lags_of(3)
    left = iter(lags)

    def make(params: list[Tensor]) -> Any:
        lag = next(left)
        return Decayed(params, OPTIMIZERS["momentum"], lambda u: read(u, lag, parts))

    settings = {} if lags_of is None else {"lags": lags}
    expected = oracle(network, batches, cross_entropy, make, accumulate=parts, **settings)
    trainer = trained(network, batches, method, OPTIMIZERS["momentum"], penalty=decay)
    for stage, weights in zip(trainer.model.children(), expected, strict=True):
        for ours, theirs in zip(stage.parameters(), weights, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=1e-12)


def test_under_current_it_is_the_optimizer_s_weight_decay() -> None:
    """Both see the newest weights; a factor that is a power of two rounds nothing."""
    batches = vector_batches(8)

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, weight_decay=2**-5)

    def half(named: Named) -> Any:
        return 2**-6 * sum(p.square().sum() for _, p in named)

    theirs = trained(mlp(), batches, StaleWeights(), sgd, stages=3)
    ours = trained(mlp(), batches, StaleWeights(), OPTIMIZERS["sgd"], stages=3, penalty=half)
    assert_same_bits(ours.state_dict(), theirs.state_dict())


class Square(torch.autograd.Function):
    """Keeps what its backward needs where no hook of autograd sees it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.twice = 2 * weight
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.twice


def hidden(named: Named) -> Any:
    return 3e-2 * sum(Square.apply(p) for _, p in named)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("penalty", [groups, hidden])
def test_what_is_kept_of_weights_alone_is_refused_under_current(penalty: Any) -> None:
    with pytest.raises(StageError, match="from weights alone.*backward='stash'"):
        trained(mlp(), vector_batches(4), StaleWeights(), stages=3, penalty=penalty)
    for method in (StaleWeights(backward="stash"), StaleWeights(backward="recompute")):
        trained(mlp(), vector_batches(8), method, stages=3, penalty=penalty)


@pytest.mark.parametrize("method", [StaleWeights(accumulate=2), PipeDream(accumulate=2)], ids=str)
def test_one_that_begins_later_is_a_graph_like_the_others(method: Method) -> None:
    """Graphs with and without it, and with more of it, hide no weights from the hooks."""
    calls: list[int] = []

    def more_and_more(named: Named) -> Any:
        named = list(named)
        calls.append(1)
        return decay(named) + (lasso(named) if len(calls) > 15 else 0.0)

    trainer = trained(mlp(), vector_batches(12), method, cuts=[2, 4], penalty=more_and_more)
    stages = [worker.stage for worker in trainer._engine.workers]
    assert not any(stage.habits.hides for stage in stages)


def test_it_is_called_once_for_a_batch_and_stage() -> None:
    calls: list[list[str]] = []

    def counted(named: Named) -> Any:
        named = list(named)
        calls.append([name for name, _ in named])
        return decay(named)

    trainer = trainer_for(mlp(), ADL(3), cuts=[2, 4], penalty=counted)
    own = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    own.append([f"{n}.{kind}" for n in (4, 6) for kind in ("weight", "bias")])
    assert calls == [[n for names in own for n in names], *own]  # the check that it is a sum
    calls.clear()
    batches = vector_batches(12)
    for n, (x, y) in enumerate(batches):
        trainer.step(x, y)
        if n == 4:
            trainer.flush()
    trainer.flush()
    assert [calls.count(names) for names in own] == [12, 12, 12]


# ------------------------------------------------------------------ where it runs


def phases() -> Method:
    return Phases((ADL(3), 3), (Synchronous(), 2), (PipeDream(), None))


def penalized(method: Method, **settings: Any) -> dict[str, Any]:
    network, batches = jobs.job_of("dropout")
    trainer = trainer_for(network, method, stages=3, seed=3, penalty=lasso, **settings)
    rows = settings.get("replicas", 1) * 4
    for x, y in trainer.batches([(x[:rows], y[:rows]) for x, y in batches]):
        trainer.step(x, y)
    trainer.flush()
    return trainer.state_dict()


def all_penalized(todo: Sequence[tuple[Method, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [penalized(method, **settings) for method, settings in todo]


@pytest.mark.timeout(240)
def test_processes_give_the_bits_of_one() -> None:
    methods = Synchronous(), PipeDream(), StaleWeights(), ADL(2), phases()
    todo: list[tuple[Method, dict[str, Any]]] = [(method, {}) for method in methods]
    for found in offbeat.launch(all_penalized, 3, todo, timeout_s=200):
        for (method, settings), state in zip(todo, found, strict=True):
            assert_same_bits(state, penalized(method, **settings))


def test_replicas_have_it_each_and_their_mean_once() -> None:
    for averaging in (AllReduce(), DaSGD(every=2, delay=1)):
        settings: dict[str, Any] = {"replicas": 2, "averaging": averaging}
        alone = penalized(PipeDream(), **settings)
        todo = [(PipeDream(), settings)]
        for found in offbeat.launch(all_penalized, 2, todo, timeout_s=100):
            assert_same_bits(found[0], alone)
    # Copies of one batch: two replicas learn what one does, the penalty counted once.
    one, two = mlp(), mlp()
    x, y = vector_batches(1)[0]
    single = trainer_for(one, penalty=decay, stages=2)
    double = trainer_for(two, penalty=decay, stages=2, replicas=2)
    for _ in range(3):
        single.step(x, y)
        double.step(torch.cat([x, x]), torch.cat([y, y]))
    for name, value in single.state_dict().items():
        torch.testing.assert_close(double.state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights(), DSP(), ADL(3)], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(method: Method, tmp_path: Path) -> None:
    batches = vector_batches(9)

    def build(penalty: Any = lasso) -> offbeat.Trainer:
        return trainer_for(mlp(), method, cuts=[2, 4], penalty=penalty)

    first = build()
    for n, (x, y) in enumerate(batches):
        first.step(x, y)
        if n == 4:
            first.save(tmp_path, wait=True)
    first.flush()
    second = build()
    assert second.resume(tmp_path).step == 5
    for x, y in batches[5:]:
        second.step(x, y)
    second.flush()
    assert_same_bits(second.state_dict(), first.state_dict())
    if method.rule != "recompute":  # where a graph is in flight
        with pytest.raises(CheckpointError, match="saves|wants to save"):
            build(penalty=None).resume(tmp_path)


def test_a_weight_of_several_stages_has_it_once() -> None:
    """At its owner, beside what the other uses send: the same sum, in another order."""
    model, batches = jobs.tied_net().double(), vector_batches(6)
    expected = plain(model, batches, decay).state_dict()
    trainer = trained(
        model, batches, Synchronous(), OPTIMIZERS["adamw"], cuts=[2, 5], penalty=decay
    )
    for name, value in trainer.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_a_frozen_weight_of_several_stages_counts_once() -> None:
    """Every stage has it, so that the sum over stages has it several times."""
    model = jobs.tied_net()
    model[0].weight.requires_grad_(False)
    model[5].bias.requires_grad_(False)
    batches = vector_batches(2, dtype=torch.float32)

    def penalty(named: Named) -> Any:
        return 1e-2 * sum(p.square().sum() for _, p in named)

    trained(model, batches, Synchronous(), cuts=[2, 5], penalty=penalty)


def test_local_losses_bring_it_in_every_stage() -> None:
    batches = vector_batches(4, dtype=torch.float32)
    model = mlp(dtype=torch.float32)

    def heads(named: Named) -> Any:
        named = list(named)
        assert all(name[0] in "0246" for name, _ in named)  # the model's, none of a head
        return decay(named)

    ours = trained(model, batches, DGL(), OPTIMIZERS["sgd"], stages=2, penalty=heads)
    theirs = trained(model, batches, DGL(), OPTIMIZERS["sgd"], stages=2)
    moved = [n for n, v in ours.state_dict().items() if not torch.equal(v, theirs.state_dict()[n])]
    assert "0.weight" in moved and "6.weight" in moved


def test_weights_that_the_loss_does_not_reach_have_it_too() -> None:
    """A stage whose output asks for no gradient, and a weight that no forward uses."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x

    stages = [Idle(), mlp(dtype=torch.float32)]
    trainer = trainer_for(stages, PipeDream(), OPTIMIZERS["sgd"], penalty=decay)
    for x, y in vector_batches(4, dtype=torch.float32):
        trainer.step(x, y)
    trainer.flush()
    weights = [torch.ones(3, 3)]
    for update in range(4):
        weights.append(weights[-1] - 0.1 * 6e-2 * weights[max(0, update - 1)])
    torch.testing.assert_close(trainer.state_dict()["0.weight"], weights[-1])


def labels(x: Tensor, y: Tensor) -> Tensor:
    return (y != -100).sum()


def empty_first() -> list[Batch]:
    """Of each batch in three parts nothing of the first counts: its loss is no number."""
    batches = [(x, y.clone()) for x, y in vector_batches(6, rows=9)]
    for _, y in batches:
        y[:3] = -100
    return batches


def test_a_part_that_counts_nothing_still_brings_it() -> None:
    batches, model = empty_first(), mlp()
    expected = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](expected.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        decay(expected.named_parameters()).backward()
        for part in (slice(3, 6), slice(6, 9)):
            (cross_entropy(expected(x[part]), y[part]) * 0.5).backward()
        optimizer.step()
    settings: dict[str, Any] = {"cuts": [2, 4], "penalty": decay, "weight": labels}
    for method in (GPipe(3), DSP(lag=(0, 0, 0), accumulate=3)):
        ours = trained(model, batches, method, OPTIMIZERS["adamw"], **settings)
        assert_same_bits(ours.state_dict(), expected.state_dict())
    for late in (ADL(3), StaleWeights(accumulate=3), DSP(accumulate=3)):
        state = trained(model, batches, late, OPTIMIZERS["adamw"], **settings).state_dict()
        assert all(value.isfinite().all() for value in state.values())


# ------------------------------------------------------------------ what is refused


def norm(named: Named) -> Any:
    return sum(p.square().sum() for _, p in named) ** 0.5


@pytest.mark.parametrize(
    ("penalty", "words"),
    [
        (norm, "of all weights and .* stage by stage: it has to be a sum.*square"),
        (lambda named: max(p.abs().max() for _, p in named), "has to be a sum"),
        (lambda named: sum(p.data.square().sum() for _, p in named), r"without detach\(\)"),
        (lambda named: 0.5, "returned 0.5 for all weights"),
        (lambda named: None, "returned None"),
        (lambda named: torch.stack([p.sum() for _, p in named]), "one number as a tensor"),
        (3, "penalty=3: give a function"),
    ],
)
def test_what_is_no_sum_over_weights_is_refused(penalty: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer_for(mlp(), stages=2, cuts=[4], penalty=penalty)


@pytest.mark.parametrize("own", [True, False])
def test_weights_of_other_stages_are_refused(own: bool) -> None:
    """Also in the words of a penalty that begins to use them later."""
    model: Any = mlp()
    other = model[0].weight if own else torch.ones(2, requires_grad=True)
    calls: list[int] = []

    def of_the_last(named: Named) -> Any:
        named = list(named)
        calls.append(1)
        late = len(calls) > 6 and named[0][0] == "4.weight"
        return decay(named) + (other.sum() if late else 0.0)

    trainer = offbeat.Trainer(
        model, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], cuts=[4], penalty=of_the_last
    )
    words = "'0.weight' of shape" if own else "a trained tensor of shape"
    trainer.step(*vector_batches(1)[0])
    with pytest.raises(StageError, match=f"penalty of stage 1 depends on {words}"):
        trainer.step(*vector_batches(1)[0])
