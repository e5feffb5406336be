"""Replicas in one process: every averaging against its oracle, the identities, the policies."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import averaging_oracles as oracles
import offbeat
from averaging_oracles import Gradient, History
from helpers import OPTIMIZERS, Factory, assert_same_bits, cnn, image_batches, mlp, plain_loop
from offbeat import nest
from offbeat.averaging import (
    AVERAGINGS,
    CO2,
    DPSGD,
    AllReduce,
    Averaging,
    CoCoD,
    DaSGD,
    DiLoCo,
    EagerDiLoCo,
    HierarchicalSGD,
    LocalSGD,
    NoLoCo,
    OverlapLocalSGD,
    PostLocalSGD,
    StreamingDiLoCo,
    averaging_named,
    flat,
)
from offbeat.averaging.averager import Averager, Task
from offbeat.averaging.co2 import LateStep
from offbeat.averaging.compression import Int8, codec_for
from offbeat.averaging.diloco import Step
from offbeat.averaging.eager_diloco import EagerStep
from offbeat.averaging.fragment import Fragment
from offbeat.averaging.moments import Moments
from offbeat.averaging.outer import Mean
from offbeat.averaging.sharding import Sampler
from offbeat.errors import BatchError, ConfigurationError
from offbeat.methods import ADL, DSP, GPipe, Method, PipeDream, StaleWeights, Synchronous
from offbeat.stages.stage import Stage

REPLICAS, ROWS, STEPS, LR = 3, 4, 23, 0.1
Batch = tuple[Tensor, Tensor]


def batches_for(replicas: int, steps: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    count = replicas * ROWS
    return [
        (
            torch.randn(count, 6, generator=generator, dtype=torch.float64),
            torch.randint(4, (count,), generator=generator),
        )
        for _ in range(steps)
    ]


def row_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def gradient_of(model: nn.Module, batches: list[Batch], replicas: int) -> Gradient:
    """The gradient of one replica's part of batch k at any weights, by plain autograd."""
    scratch = copy.deepcopy(model)

    def gradient(replica: int, k: int, x: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(x, scratch.parameters())
        inputs, targets = (part.chunk(replicas)[replica] for part in batches[k - 1])
        loss = nn.functional.cross_entropy(scratch(inputs), targets)
        return torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss, list(scratch.parameters()))]
        )

    return gradient


def trainer_with(
    averaging: Averaging | None,
    *,
    replicas: int = REPLICAS,
    model: nn.Module | None = None,
    optimizer: Factory = OPTIMIZERS["sgd"],
    **settings: Any,
) -> offbeat.Trainer:
    return offbeat.Trainer(
        mlp() if model is None else copy.deepcopy(model),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        replicas=replicas,
        averaging=averaging,
        **settings,
    )


def rows_now(trainer: offbeat.Trainer) -> list[Tensor]:
    """The weights of every replica, as one row each."""
    return [
        torch.cat(
            [row_of(w.stage.module) for w in trainer._engine.workers if w.stage.replica == replica]
        )
        for replica in range(trainer.replicas)
    ]


def history_of(trainer: offbeat.Trainer, batches: list[Batch]) -> History:
    history = []
    for x, y in batches:
        trainer.step(x, y)
        history.append(rows_now(trainer))
    return history


def assert_close(ours: History, theirs: History, tolerance: float = 1e-12) -> None:
    assert len(ours) == len(theirs)
    for k, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        for replica, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert (a - b).abs().max() <= tolerance, f"step {k}, replica {replica}"


# ------------------------------------------------------------------ oracles


@dataclass(frozen=True)
class Case:
    averaging: Averaging
    oracle: Callable[..., History]
    settings: dict[str, Any]
    momentum: bool = False


RUNS = {
    # The four linear layers of ``mlp()`` have 56, 63, 48 and 28 numbers; what runs of them have:
    2: [list(range(119)), list(range(119, 195))],
    3: [list(range(56)), list(range(56, 119)), list(range(119, 195))],
}
LAYERS = [list(range(56)), list(range(56, 119)), list(range(119, 167)), list(range(167, 195))]


def nesterov(lr: float, momentum: float = 0.9) -> dict[str, Any]:
    return {"outer_lr": lr, "outer_momentum": momentum, "nesterov": True}


CASES = {
    "all-reduce": Case(AllReduce(), oracles.all_reduce, {}),
    "local": Case(LocalSGD(4), oracles.local_sgd, {"tau": 4}),
    "local, momentum": Case(LocalSGD(4), oracles.local_sgd, {"tau": 4}, momentum=True),
    "local, offset": Case(LocalSGD(4, offset=1), oracles.local_sgd, {"tau": 4, "offset": 1}),
    "post-local, offset": Case(
        PostLocalSGD(3, switch=5, offset=1),
        oracles.post_local_sgd,
        {"tau": 3, "switch": 5, "offset": 1},
    ),
    "post-local": Case(PostLocalSGD(3, switch=5), oracles.post_local_sgd, {"tau": 3, "switch": 5}),
    "dasgd": Case(DaSGD(4, 1), oracles.dasgd, {"tau": 4, "d": 1, "xi": 0.25}),
    "dasgd, momentum": Case(
        DaSGD(4, 2, 0.5, optimizer_state="keep"),
        oracles.dasgd,
        {"tau": 4, "d": 2, "xi": 0.5},
        momentum=True,
    ),
    "dasgd, no delay": Case(DaSGD(3, 0, 0.4), oracles.dasgd, {"tau": 3, "d": 0, "xi": 0.4}),
    "dasgd, whole round": Case(DaSGD(3, 3, 0.4), oracles.dasgd, {"tau": 3, "d": 3, "xi": 0.4}),
    "mean-preserving": Case(
        DaSGD(4, 2, 0.25, 1.0), oracles.corrected_dasgd, {"tau": 4, "d": 2, "xi": 0.25}
    ),
    "mean-preserving, whole round": Case(
        DaSGD(3, 3, 0.25, 1.0), oracles.corrected_dasgd, {"tau": 3, "d": 3, "xi": 0.25}
    ),
    "cocod": Case(CoCoD(3), oracles.cocod, {"tau": 3}),
    "overlap": Case(
        OverlapLocalSGD(3, pull=0.6), oracles.overlap_local_sgd, {"tau": 3, "alpha": 0.6, "beta": 0}
    ),
    "overlap, anchor momentum": Case(
        OverlapLocalSGD(3, pull=0.6, momentum=0.7),
        oracles.overlap_local_sgd,
        {"tau": 3, "alpha": 0.6, "beta": 0.7},
    ),
    "diloco": Case(DiLoCo(4), oracles.diloco, {"tau": 4} | nesterov(0.7)),
    "diloco, heavy ball": Case(
        DiLoCo(4, outer_lr=0.5, outer_momentum=0.8, nesterov=False),
        oracles.diloco,
        {"tau": 4, "outer_lr": 0.5, "outer_momentum": 0.8, "nesterov": False},
    ),
    "streaming, three fragments": Case(
        StreamingDiLoCo(6, fragments=3, delay=2, mix=0.5, outer_lr=0.4),
        oracles.streaming_diloco,
        {"tau": 6, "delay": 2, "alpha": 0.5, "fragments": RUNS[3]} | nesterov(0.4),
    ),
    "streaming, named, merged where torchft does": Case(
        StreamingDiLoCo(
            6, fragments=[["4", "0"], ["2", "6.weight", "6.bias"]], delay=2, mix=0.5, offset=-2
        ),
        oracles.streaming_diloco,
        {
            "tau": 6, "delay": 2, "alpha": 0.5, "offset": -2,
            "fragments": [LAYERS[0] + LAYERS[2], LAYERS[1] + LAYERS[3]],
        } | nesterov(0.7),
    ),
    "streaming, uneven": Case(
        StreamingDiLoCo(5, fragments=2, delay=5, mix=0.25),
        oracles.streaming_diloco,
        {"tau": 5, "delay": 5, "alpha": 0.25, "fragments": RUNS[2]} | nesterov(0.7),
    ),
    "eager": Case(EagerDiLoCo(4), oracles.eager_diloco, {"tau": 4} | nesterov(0.7)),
    "co2": Case(
        CO2(3), oracles.co2,
        {"tau": 3, "outer_lr": 1.0, "outer_momentum": 0.5, "penalty": 1.0, "clip": None},
    ),
    "noloco": Case(
        NoLoCo(3, outer_lr=0.6), oracles.noloco,
        {"tau": 3, "outer_lr": 0.6, "outer_momentum": 0.5, "size": 2},
    ),
    "d-psgd": Case(DPSGD(), oracles.d_psgd, {"tau": 1}),
    "d-psgd, less often": Case(DPSGD(3), oracles.d_psgd, {"tau": 3}),
    "hierarchical": Case(
        HierarchicalSGD(2, rounds=3, size=2), oracles.hierarchical_sgd,
        {"tau": 2, "rounds": 3, "size": 2},
    ),
    "co2, clipped": Case(
        CO2(3, outer_lr=0.9, outer_momentum=0.2, penalty=2.0, clip=0.01), oracles.co2,
        {"tau": 3, "outer_lr": 0.9, "outer_momentum": 0.2, "penalty": 2.0, "clip": 0.01},
    ),
}  # fmt: skip


def course_of(case: Case, replicas: int = REPLICAS) -> History:
    """The weights of every replica after every step."""
    momentum = 0.9 if case.momentum else 0.0
    trainer = trainer_with(
        case.averaging,
        replicas=replicas,
        optimizer=lambda params: torch.optim.SGD(params, lr=LR, momentum=momentum),
    )
    return history_of(trainer, batches_for(replicas))


def expected_of(case: Case, replicas: int = REPLICAS) -> History:
    momentum: dict[str, Any] = {"momentum": 0.9} if case.momentum else {}
    gradient = gradient_of(mlp(), batches_for(replicas), replicas)
    starts = [row_of(mlp())] * replicas
    return case.oracle(starts, gradient, STEPS, lr=LR, **case.settings, **momentum)[1:]


def check(case: Case, replicas: int = REPLICAS) -> None:
    assert_close(course_of(case, replicas), expected_of(case, replicas))


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    check(CASES[name])


VECTORS: dict[Averaging, list[tuple[float, float]]] = {
    # Those of tests/test_averaging_oracles.py, after steps 4, 5, 8 and 9, from unequal starts.
    DaSGD(4, 1, 0.25): [
        (0.3439, 1.6878), (0.864265, 1.2166425), (0.90104918, 1.69993238),
        (1.20310415, 1.43285287),
    ],
    DaSGD(4, 4, 0.4): [
        (0.3439, 1.6878), (0.40951, 1.81902), (0.83732312, 1.46513623), (0.85359080, 1.61862261),
    ],
    OverlapLocalSGD(4, pull=0.6): [
        (0.3439, 1.6878), (0.40951, 1.81902), (0.83732312, 1.46513623), (0.85359080, 1.61862261),
    ],
    DaSGD(4, 1, 0.25, progress=1.0): [
        (0.3439, 1.6878), (0.9134725, 1.3150575), (0.93692145, 1.77167692),
        (1.25626261, 1.58147593),
    ],
    CoCoD(4): [
        (0.3439, 1.6878), (0.40951, 1.81902), (1.24148279, 1.46711558), (1.21733451, 1.62040402),
    ],
    LocalSGD(4): [
        (1.01585, 1.01585), (1.014265, 1.214265), (1.35429918, 1.35429918),
        (1.31886927, 1.51886927),
    ],
}  # fmt: skip


class Point(nn.Module):
    """One weight x; with the loss below its gradient is x - c."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        return self.x - c


def half_square(output: Tensor, _target: Tensor) -> Tensor:
    return 0.5 * (output**2).mean()


@pytest.mark.parametrize("averaging", VECTORS, ids=lambda a: a.title)
def test_vectors_that_were_computed_apart(averaging: Averaging) -> None:
    trainer = offbeat.Trainer(
        Point(), loss=half_square, optimizer=OPTIMIZERS["sgd"], replicas=2, averaging=averaging
    )
    trainer._engine.workers[1].stage.parameters[0].data.fill_(1.0)  # the vectors start from (0, 1)
    history = history_of(trainer, [(torch.tensor([[1.0], [3.0]]).double(), torch.zeros(2))] * 9)
    for k, wanted in zip((4, 5, 8, 9), VECTORS[averaging], strict=True):
        assert [row.item() for row in history[k - 1]] == pytest.approx(wanted, abs=1e-8)


# ------------------------------------------------------------------ identities


def same_course(
    one: Averaging, other: Averaging, replicas: int = REPLICAS, **settings: Any
) -> None:
    batches = batches_for(replicas)
    ours = history_of(trainer_with(one, replicas=replicas, **settings), batches)
    theirs = history_of(trainer_with(other, replicas=replicas, **settings), batches)
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OverlapLocalSGD(4, pull=0.6), DaSGD(4, delay=4, keep=0.4)),
        (CoCoD(4), DaSGD(4, delay=4, keep=0.0, progress=1.0)),
        (
            StreamingDiLoCo(4, fragments=1, delay=2, mix=0.25, outer_lr=1.0, outer_momentum=0.0),
            DaSGD(4, delay=2, keep=0.25),
        ),
        (DaSGD(4, delay=0, keep=0.0), LocalSGD(4)),
        (DaSGD(1, delay=0, keep=0.0), AllReduce()),
        (DiLoCo(4, outer_lr=1.0, outer_momentum=0.0), LocalSGD(4)),
        (PostLocalSGD(4, switch=6), LocalSGD(4, warmup=6)),
        (LocalSGD(4, warmup=1000), AllReduce()),
    ],
    ids=lambda averaging: averaging.title,
)
def test_identities(one: Averaging, other: Averaging) -> None:
    same_course(one, other)


def test_eager_with_one_replica_is_diloco() -> None:
    same_course(EagerDiLoCo(4), DiLoCo(4), replicas=1)


def test_progress_per_round_and_shrinking_disagreement() -> None:
    """A constant gradient of -1: the mean moves by every - delay + keep delay per round."""
    for every, delay, keep in [(4, 1, 0.25), (4, 2, 0.25), (4, 4, 0.25), (8, 2, 0.5)]:
        averaging = DaSGD(every, delay, keep)
        trainer = offbeat.Trainer(
            Point(),
            loss=lambda output, _: -output.mean(),
            optimizer=OPTIMIZERS["sgd"],
            replicas=2,
            averaging=averaging,
        )
        x, y = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2)
        trainer._engine.workers[1].stage.parameters[0].data.fill_(1.0)
        history = history_of(trainer, [(x, y)] * (3 * every + delay))
        first, second = history[every + delay - 1], history[2 * every + delay - 1]
        moved = float(torch.cat(second).mean() - torch.cat(first).mean())
        assert moved == pytest.approx(0.1 * averaging.updates_kept, abs=1e-12)
        gaps = [(both[1] - both[0]).item() for both in (first, second)]
        assert gaps == pytest.approx([keep, keep**2], abs=1e-12)


def test_all_reduce_is_a_plain_loop_over_the_whole_batch() -> None:
    model = mlp()
    batches = batches_for(REPLICAS)
    reference, losses = plain_loop(model, batches, OPTIMIZERS["adamw"])
    trainer = trainer_with(None, model=model, optimizer=OPTIMIZERS["adamw"])
    assert isinstance(trainer.averaging, AllReduce)
    ours = [float(trainer.step(x, y)) for x, y in batches]  # type: ignore[arg-type]
    assert ours == pytest.approx(losses, abs=1e-12)
    for name, value in trainer.state_dict().items():
        assert (value - reference.state_dict()[name]).abs().max() < 1e-12


def test_one_replica_is_a_plain_loop_to_the_bit() -> None:
    batches = image_batches(5)
    reference, _ = plain_loop(cnn(), batches)
    for averaging in (AllReduce(), LocalSGD(2), PostLocalSGD(2, switch=3)):
        trainer = trainer_with(averaging, replicas=1, model=cnn(), optimizer=OPTIMIZERS["momentum"])
        for x, y in batches:
            trainer.step(x, y)
        assert_same_bits(trainer.state_dict(), dict(reference.state_dict()))


# ------------------------------------------------------------------ mutations


def broken_order(right: Callable[[Averager], list[Task]]) -> Callable[[Averager], list[Task]]:
    """Starts before it merges where both fall on one update, and the other way round."""
    return lambda self: right(self)[::-1]


def one_update_late(right: Callable[[Averager], list[Task]]) -> Callable[[Averager], list[Task]]:
    """Every task is done one update after its time."""
    held: dict[int, list[Task]] = {}

    def late(self: Averager) -> list[Task]:
        now, held[id(self)] = held.get(id(self), []), right(self)
        return now

    return late


@pytest.mark.parametrize("mutation", [broken_order, one_update_late])
@pytest.mark.parametrize("name", ["local", "dasgd, whole round", "streaming, uneven", "eager"])
def test_a_wrong_order_is_seen(name: str, mutation: Any, monkeypatch: Any) -> None:
    check(CASES[name])
    monkeypatch.setattr(Averager, "after_update", mutation(Averager.after_update))
    with pytest.raises((AssertionError, KeyError, offbeat.OffbeatError)):
        check(CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if name != "all-reduce"])
def test_a_wrong_mean_is_seen(name: str, monkeypatch: Any) -> None:
    """The last replica is forgotten in the sum, unless it is alone."""
    right = flat.ordered_mean
    wrong: Any = lambda vectors, count: right(vectors[:-1] or vectors, count)  # noqa: E731
    monkeypatch.setattr("offbeat.averaging.fragment.ordered_mean", wrong)
    with pytest.raises(AssertionError):
        check(CASES[name])


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("dasgd", Fragment, "_merged"),
        ("mean-preserving", Fragment, "_merged"),
        ("diloco", Step, "_stepped"),
        ("eager", EagerStep, "target"),
        ("co2", LateStep, "target"),
        ("cocod", Mean, "part"),
    ],
)
def test_a_slightly_wrong_rule_is_seen(name: str, kind: Any, method: str, monkeypatch: Any) -> None:
    right = getattr(kind, method)

    def wrong(self: Any, *arguments: Any) -> Any:
        value = right(self, *arguments)
        return None if value is None else value * 1.001

    check(CASES[name])
    monkeypatch.setattr(kind, method, wrong)
    with pytest.raises(AssertionError):
        check(CASES[name])


# ------------------------------------------------------------------ times stages


@pytest.mark.parametrize(
    "method",
    [Synchronous(), GPipe(2), StaleWeights(), PipeDream(), DSP(), DSP(hop=2), ADL(2)],
    ids=lambda m: f"{m.title} {getattr(m, 'hop', '') or ''}",
)
@pytest.mark.parametrize("progress", [None, 1.0])
def test_every_stage_counts_its_own_updates(method: Method, progress: float | None) -> None:
    """Two lone trainers, merged by hand after each stage's own updates, give the same bits."""
    every, delay, keep = 3, 2, 0.25
    batches = batches_for(2, 17)
    together = trainer_with(
        DaSGD(every, delay, keep, progress), replicas=2, method=method, cuts=[2, 4]
    )
    alone = [trainer_with(None, replicas=1, method=method, cuts=[2, 4]) for _ in range(2)]
    sent: dict[tuple[int, int], list[Tensor]] = {}  # by stage and update: each replica's weights

    def merge_by_hand(stage: Stage, replica: int) -> None:
        started = sent.get((stage.index, stage.version - delay))
        now = row_of(stage.module)
        if started is not None:
            mean, before = (started[0] + started[1]) / 2, started[replica]
            if progress is None:
                now = mean + keep * (now - mean)
            else:
                now = mean + keep * (before - mean) + progress * (now - before)
            values = now.split([p.numel() for p in stage.parameters])
            with torch.no_grad():
                for parameter, value in zip(stage.parameters, values, strict=True):
                    parameter.copy_(value.view_as(parameter))
        if stage.version % every == 0:
            sent.setdefault((stage.index, stage.version), []).append(now)

    def merging_after(update: Callable[[], None], stage: Stage, replica: int) -> Any:
        return lambda: (update(), merge_by_hand(stage, replica))  # type: ignore[func-returns-value]

    for replica, trainer in enumerate(alone):
        for worker in trainer._engine.workers:
            stage = worker.stage
            stage.update = merging_after(stage.update, stage, replica)  # type: ignore[method-assign]
    for n, (x, y) in enumerate(batches):
        together.step(x, y)
        for replica, trainer in enumerate(alone):
            trainer.step(x.chunk(2)[replica], y.chunk(2)[replica])
        for ours, trainer in zip(rows_now(together), alone, strict=True):
            assert torch.equal(ours, rows_now(trainer)[0]), f"step {n}"
    assert len(sent) > 9


def test_clipping_and_all_reduce_over_stages_clip_the_mean() -> None:
    model, batches = mlp(), batches_for(2)
    reference, _ = plain_loop(model, batches, OPTIMIZERS["sgd"], clip=0.05)
    trainer = trainer_with(AllReduce(), replicas=2, model=model, clip=0.05, cuts=[2, 4])
    for x, y in batches:
        trainer.step(x, y)
    for name, value in trainer.state_dict().items():
        assert (value - reference.state_dict()[name]).abs().max() < 1e-12


# ------------------------------------------------------------------ policies


def run(averaging: Averaging, steps: int = 9, **settings: Any) -> offbeat.Trainer:
    trainer = trainer_with(averaging, replicas=2, **settings)
    for x, y in batches_for(2, steps):
        trainer.step(x, y)
    return trainer


def moments(trainer: offbeat.Trainer, replica: int, name: str) -> list[Tensor]:
    (optimizer,) = trainer._engine.workers[replica].stage.optimizers
    return [state[name] for state in optimizer.state.values() if name in state]


def test_optimizer_state_is_kept_averaged_or_reset() -> None:
    adamw = OPTIMIZERS["adamw"]
    kept = run(LocalSGD(3), optimizer=adamw)
    assert not torch.equal(moments(kept, 0, "exp_avg")[0], moments(kept, 1, "exp_avg")[0])
    averaged = run(LocalSGD(3, optimizer_state="average"), optimizer=adamw)
    for name in ("exp_avg", "exp_avg_sq"):
        for one, other in zip(moments(averaged, 0, name), moments(averaged, 1, name), strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(moments(averaged, 0, "exp_avg")[0], moments(kept, 0, "exp_avg")[0])
    reset = run(LocalSGD(3, optimizer_state="reset"), optimizer=adamw)
    assert moments(reset, 0, "exp_avg") == []
    late = run(DaSGD(3, 2, 0.5, 1.0, optimizer_state="average"), 20, optimizer=adamw)
    assert all((m >= 0).all() for r in (0, 1) for m in moments(late, r, "exp_avg_sq"))


class UsedLater(nn.Module):
    """A layer whose weights get their first gradient at the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.layer(x)
        return y if self.seen > 2 else x


def spoilt(batch: Batch, rows: slice = slice(None)) -> Batch:
    x, y = batch[0].clone(), batch[1]
    x[rows] = torch.nan
    return x, y


def guarded(policy: Any, nonfinite: Any = "skip", **settings: Any) -> offbeat.Trainer:
    """Averages of weights and moments that are merged an update after their start."""
    averaging = DaSGD(every=1, delay=1, keep=0.0, optimizer_state=policy)
    settings = {"optimizer": OPTIMIZERS["momentum"], **settings}
    return trainer_with(
        averaging, replicas=2, guards=offbeat.Guards(nonfinite=nonfinite), **settings
    )


def test_moments_made_after_the_start_are_not_averaged() -> None:
    first, second = batches_for(2, 2)
    ends = []
    for policy in ("keep", "average"):
        trainer = guarded(policy)
        trainer.step(*spoilt(first))  # dropped: there is no momentum when the average starts
        trainer.step(*second)
        ends.append([moments(trainer, replica, "momentum_buffer") for replica in (0, 1)])
    kept, averaged = (list(chain(*end)) for end in ends)
    assert len(averaged) == 2 * len(list(mlp().parameters()))
    assert all(map(torch.equal, kept, averaged))


def test_moments_are_averaged_over_the_replicas_that_have_them() -> None:
    batches = batches_for(2, 2)
    trainer = guarded("average")
    trainer.step(*spoilt(batches[0], slice(ROWS)))  # replica 0's part
    assert moments(trainer, 0, "momentum_buffer") == []
    sent = [buffer.clone() for buffer in moments(trainer, 1, "momentum_buffer")]
    trainer.step(*batches[1])
    for replica in (0, 1):
        assert all(map(torch.equal, moments(trainer, replica, "momentum_buffer"), sent))


@pytest.mark.parametrize("averaging", [DaSGD(1, 1), DaSGD(3, 2, 0.5), CO2(2), LocalSGD(2)])
def test_moments_survive_a_roll_back(averaging: Averaging) -> None:
    trainer = trainer_with(
        replace(averaging, optimizer_state="average"),
        replicas=2,
        optimizer=OPTIMIZERS["adamw"],
        guards=offbeat.Guards(nonfinite="roll-back"),
    )
    for k, batch in enumerate(batches_for(2, 12)):
        trainer.step(*(spoilt(batch, slice(ROWS)) if k in (0, 5) else batch))
        for replica in (0, 1):
            assert all((m >= 0).all() for m in moments(trainer, replica, "exp_avg_sq"))


def test_a_weight_may_get_its_first_gradient_before_a_merge() -> None:
    trainer = guarded("average", model=nn.Sequential(*mlp(), UsedLater()), stages=1)
    for batch in batches_for(2, 3):
        trainer.step(*batch)
    ours, theirs = (moments(trainer, replica, "momentum_buffer") for replica in (0, 1))
    # All but the last two, weight and bias, had momentum when the average started.
    assert [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)] == [True] * 8 + [
        False
    ] * 2
    for batch in batches_for(2, 6)[3:]:
        trainer.step(*batch)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adagrad,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adafactor,
        lambda params: torch.optim.Adam(params, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1),
    ],
)
def test_what_an_optimizer_will_keep_is_known_before_its_first_step(optimizer: Any) -> None:
    trainer = guarded("average", optimizer=optimizer)
    batches = batches_for(2, 4)
    numbers = torch.get_rng_state()
    trainer.step(*spoilt(batches[0], slice(ROWS)))
    sent = [
        len(fragment.under_way[1].moments)
        for w in trainer._engine.workers
        for fragment in fragments(w)
    ]
    assert sent[0] == sent[1]
    assert torch.equal(numbers, torch.get_rng_state())
    for batch in batches[1:]:
        trainer.step(*batch)


class Counting(torch.optim.Adam):
    """Counts the steps of anything like it, stand-ins included."""

    def step(self, closure: Any = None) -> Any:
        self.steps.append(1)
        return super().step(closure)

    steps: ClassVar[list[int]] = []


def test_asking_an_optimizer_leaves_it_alone() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    adam, counting = torch.optim.Adam([weight]), Counting([weight])
    torch.optim.lr_scheduler.StepLR(adam, 1)  # puts a step of its own before the optimizer's
    for hooked in (adam, counting):
        hooked.register_step_post_hook(lambda *_: pytest.fail("the optimizer itself took a step"))
    for optimizer in (adam, counting, torch.optim.SparseAdam([weight])):
        places, (row, there) = Moments([weight], [optimizer], stage=0).parts()
        assert [place.name for place in places] == ["exp_avg", "exp_avg_sq"]
        assert row.tolist() == [0.0] * 12
        assert there.tolist() == [0.0] * 2
        assert not optimizer.state
    assert torch.equal(weight, torch.ones(3, 2))


def names_of(moments: Moments) -> list[str]:
    return [place.name for place in moments.parts()[0]]


def test_a_stand_in_is_asked_once_for_each_kind_of_weight() -> None:
    Counting.steps.clear()
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (3, 2), (4,))]
    asked = Moments(weights, [Counting(weights)], stage=0)
    for _ in range(3):
        assert names_of(asked) == ["exp_avg", "exp_avg_sq"] * 3
    assert len(Counting.steps) == 2


def test_a_weight_that_was_stepped_tells_of_others() -> None:
    """Wrappers step their optimizer with every stand-in, so one is asked only where it must be."""
    shapes = ((3, 2), (5, 4), (3,), (7,))
    weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = Counting(weights)
    for weight in weights[::2]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    Counting.steps.clear()
    assert names_of(Moments(weights, [optimizer], stage=0)) == ["exp_avg", "exp_avg_sq"] * 4
    assert not Counting.steps


@pytest.mark.parametrize("stepped", range(5))
def test_what_is_kept_may_depend_on_the_shape(stepped: int) -> None:
    """Adafactor keeps rows and columns of a matrix, which have its shape if it is thin."""
    shapes = ((3, 2), (4, 4), (3, 1), (1, 4), (5,))
    weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    kept: list[list[str]] = []
    for some in ([weights[stepped]], weights):
        optimizer = torch.optim.Adafactor(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight) if any(weight is w for w in some) else None
        optimizer.step()
        kept.append(names_of(Moments(weights, [optimizer], stage=0)))
    assert kept[0] == kept[1] == ["row_var", "col_var", "variance"]


def test_hooks_of_all_optimizers_see_no_stand_in() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    hook = register_optimizer_step_pre_hook(lambda *_: pytest.fail("a step"))
    try:
        assert names_of(Moments([weight], [torch.optim.Adam([weight])], stage=0))
    finally:
        hook.remove()


def fragments(worker: Any) -> list[Any]:
    return list(worker.averager._fragments.values())


def test_an_optimizer_that_cannot_be_asked_is_refused() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(p not in self.known for group in self.param_groups for p in group["params"]):
                raise KeyError("who is this?")
            return super().step(closure)

        known: set[Any]

    def strange(params: Any) -> Strange:
        made = Strange(params, lr=0.1)
        made.known = set(params)
        return made

    trainer = guarded("average", optimizer=strange)
    with pytest.raises(ConfigurationError, match=r"'average'.*Strange.*who is this.*'keep'"):
        trainer.step(*spoilt(batches_for(2, 1)[0]))


@pytest.mark.parametrize("averaging", [DaSGD(1, 1), DaSGD(3, 2, 0.5, exact=False), CO2(2)])
def test_moments_under_way_are_in_a_checkpoint(tmp_path: Any, averaging: Averaging) -> None:
    averaging = replace(averaging, optimizer_state="average")
    batches = batches_for(2, 8)
    batches[0] = spoilt(batches[0], slice(ROWS))

    def made() -> offbeat.Trainer:
        guards = offbeat.Guards(nonfinite="roll-back")
        adamw = OPTIMIZERS["adamw"]
        return trainer_with(averaging, replicas=2, optimizer=adamw, guards=guards)

    whole, saved = made(), []
    for at, batch in enumerate(batches):
        whole.step(*batch)
        whole.save(tmp_path / str(at), wait=True)
        saved.append(tmp_path / str(at))
    ours = [*rows_now(whole), *chain(*(moments(whole, r, "exp_avg") for r in (0, 1)))]
    for at, folder in enumerate(saved):
        resumed = made()
        resumed.resume(folder)
        for batch in batches[at + 1 :]:
            resumed.step(*batch)
        found = [*rows_now(resumed), *chain(*(moments(resumed, r, "exp_avg") for r in (0, 1)))]
        assert all(map(torch.equal, ours, found)), at


@pytest.mark.parametrize("averaging", [LocalSGD(2), DaSGD(3, 1, 0.5)], ids=str)
def test_momentum_of_sparse_gradients_is_averaged_like_that_of_dense_ones(
    averaging: Averaging,
) -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        trainer = trainer_with(
            replace(averaging, optimizer_state="average"),
            replicas=2,
            model=nn.Sequential(
                nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 4)
            ).double(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            stages=1,
        )
        draw = torch.Generator().manual_seed(1)
        for _ in range(9):
            x = torch.randint(0, 9, (8, 2), generator=draw)
            trainer.step(x, torch.randint(0, 4, (8,), generator=draw))
        trainer.flush()
        ends.append(trainer.state_dict())
    for name, dense in ends[0].items():
        torch.testing.assert_close(ends[1][name], dense)


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        (LocalSGD(4), "keep"),
        (DaSGD(4, 1), "average"),
        (DaSGD(4, 0), "keep"),
        (DaSGD(4, 1, progress=1.0), "keep"),
        (CoCoD(4), "keep"),
        (DaSGD(4, 4), "keep"),
        (StreamingDiLoCo(4, delay=1), "average"),
        (OverlapLocalSGD(4), "keep"),
        (CO2(4), "keep"),
        (AllReduce(), "keep"),
        (DaSGD(4, 1, optimizer_state="reset"), "reset"),
    ],
    ids=str,
)
def test_velocity_is_pulled_back_with_weights(averaging: Averaging, expected: str) -> None:
    assert averaging.state_at_merge == expected
    named = replace(averaging, optimizer_state=expected)
    ours, theirs = (
        rows_now(run(one, 9, optimizer=OPTIMIZERS["momentum"])) for one in (averaging, named)
    )
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("policy", "stable"), [("keep", False), (None, True)])
def test_dasgd_is_stable_by_default_where_kept_velocity_is_not(policy: Any, stable: bool) -> None:
    """lr x curvature 0.7: above what benchmarks/stability finds for kept momentum, 0.585."""
    trainer = offbeat.Trainer(
        Point(),
        loss=lambda output, _: 0.35 * (output**2).sum(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9),
        replicas=2,
        averaging=DaSGD(4, 1, optimizer_state=policy),
    )
    c = torch.tensor([[1.0], [1.0]]).double()
    trainer.step(c, torch.zeros(2))
    for _ in range(200):
        trainer.step(c * 0, torch.zeros(2))
    assert (abs(float(rows_now(trainer)[0])) < 1) is stable


def test_statistics_stay_local_and_are_averaged_for_export() -> None:
    batches = image_batches(4, rows=8)
    trainers = {
        policy: offbeat.Trainer(
            cnn(),
            loss=nn.functional.cross_entropy,
            optimizer=OPTIMIZERS["sgd"],
            replicas=2,
            averaging=LocalSGD(2, statistics=policy),
        )
        for policy in ("average", "local")
    }
    for trainer in trainers.values():
        for x, y in batches:
            trainer.step(x, y)
    own = [w.stage.module.state_dict() for w in trainers["average"]._engine.workers]
    name = "1.running_mean"
    assert not torch.equal(own[0][name], own[1][name])
    mean = (own[0][name] + own[1][name]) / 2
    assert torch.equal(trainers["average"].state_dict()[name], mean)
    assert torch.equal(trainers["local"].state_dict()[name], own[0][name])
    assert trainers["average"].state_dict()["1.num_batches_tracked"] == 4


def test_export_evaluation_and_flush() -> None:
    batches = batches_for(2, 6)
    trainer = trainer_with(DaSGD(4, 3), replicas=2)
    for x, y in batches:
        trainer.step(x, y)
    before = rows_now(trainer)
    assert not torch.equal(*before)
    mean = torch.cat([value.reshape(-1) for value in trainer.state_dict().values()])
    assert torch.equal(mean, (before[0] + before[1]) / 2)
    of_mean = trainer.evaluate(batches)
    of_first = trainer.evaluate(batches, of="replica")
    assert all(torch.equal(a, b) for a, b in zip(rows_now(trainer), before, strict=True))
    lone = mlp()
    for row, found in ((mean, of_mean), (before[0], of_first)):
        nn.utils.vector_to_parameters(row, lone.parameters())
        with torch.no_grad():
            losses = [float(nn.functional.cross_entropy(lone(x), y)) for x, y in batches]
        assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-12)
    with pytest.raises(ConfigurationError, match="unknown of 'mean'"):
        trainer.evaluate(batches, of="mean")  # type: ignore[arg-type]
    trainer.flush()
    assert all(torch.equal(row, mean) for row in rows_now(trainer))
    # The average that was under way is dropped: a round begins at the flush.
    assert not any(w.transport.waiting(w.stage.index) for w in trainer._engine.workers)
    trainer.step(*batches[0])
    ledger = [entry for entry in trainer.ledger if entry.kind in "SAM"]
    assert [(e.kind, e.batch) for e in ledger if e.replica == 0] == [("S", 4)]
    for x, y in batches_for(2, 3):
        trainer.step(x, y)
    assert [e.batch for e in trainer.ledger if e.kind == "S" and e.replica == 0] == [4, 10]


def test_a_loaded_state_goes_to_every_replica() -> None:
    trainer = run(DaSGD(4, 2))
    state = {name: value * 0 for name, value in trainer.state_dict().items()}
    trainer.flush()
    trainer.load_state_dict(state)
    assert all(not row.any() for row in rows_now(trainer))
    for x, y in batches_for(2, 9):
        trainer.step(x, y)


def test_the_ledger_tells_start_arrival_and_merge() -> None:
    trainer = run(DaSGD(4, 1), 10)
    found = [(e.kind, e.replica, e.batch, e.version) for e in trainer.ledger if e.kind in "SAM"]
    for replica in (0, 1):
        mine = [(kind, number, version) for kind, r, number, version in found if r == replica]
        assert mine == [
            ("S", 4, 4), ("A", 4, 5), ("M", 4, 5), ("S", 8, 8), ("A", 8, 9), ("M", 8, 9),
        ]  # fmt: skip
        assert trainer.ledger.waits(0, replica) == {4: 0.0, 8: 0.0}
    names = {
        event["cat"] for event in trainer.ledger.chrome_trace()["traceEvents"] if "cat" in event
    }
    assert {"start of an average", "average under way", "merge"} <= names
    assert trainer.ledger.lags(0, replica=1) == dict.fromkeys(range(10), 0)


# ------------------------------------------------------------------ compression


def test_int8_puts_one_byte_per_number_and_four_per_tensor_on_the_wire() -> None:
    sizes = [56, 63, 48, 28]
    row = torch.randn(sum(sizes))
    sent = Int8(torch.float32, sizes).encode(row)
    assert sum(part.numel() * part.itemsize for part in sent) == sum(sizes) + 4 * len(sizes)
    numbers, scales = sent
    for part, code, scale in zip(row.split(sizes), numbers.split(sizes), scales, strict=True):
        assert code.dtype == torch.int8
        assert scale == part.abs().max() / 127
        assert torch.equal(code, (part / scale).round().to(torch.int8))
    bf16 = codec_for("bf16", torch.float32, sizes).encode(row)
    assert [(part.dtype, part.numel()) for part in bf16] == [(torch.bfloat16, sum(sizes))]


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_error_feedback_loses_nothing(compress: str) -> None:
    """A change far below one step of the code arrives, late: the sum of what was read is right."""
    codec = codec_for(compress, torch.float64, [3])
    row = torch.tensor([1.0, 1e-4, -3e-3], dtype=torch.float64)
    total = sum(codec.decode(codec.encode(row)) for _ in range(1000))
    assert isinstance(total, Tensor)
    assert (total / 1000 - row).abs().max() < 1e-5
    assert torch.equal(codec_for(compress, torch.float32, [2]).decode(
        codec_for(compress, torch.float32, [2]).encode(torch.zeros(2))
    ), torch.zeros(2))  # fmt: skip


def test_compressed_training_follows_the_uncompressed() -> None:
    for averaging in (AllReduce(), DaSGD(2, 1), DiLoCo(2), CO2(2), EagerDiLoCo(2)):
        plain = rows_now(run(averaging, 20))[0]
        near = rows_now(run(replace(averaging, compress="bf16"), 20))[0]
        coarse = rows_now(run(replace(averaging, compress="int8"), 20))[0]
        assert 0 < (near - plain).abs().max() < 1e-3, averaging.title
        assert 0 < (coarse - plain).abs().max() < 2e-2, averaging.title


# ------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DaSGD(4, 5), r"delay=5: .* with every=4 give a whole number from 0 to 4"),
        (lambda: DaSGD(4, 1, 1.5), r"keep=1.5: give a number from 0 to 1, the share of its own"),
        (lambda: DaSGD(4, 1, progress=-1), r"progress=-1: give a number from 0 to 1"),
        (lambda: DaSGD(0, 0), r"every=0: give a whole number of at least 1"),
        (lambda: LocalSGD(4, warmup=-1), r"warmup=-1: give the number of updates"),
        (lambda: LocalSGD(4, optimizer_state="drop"), r"unknown optimizer_state 'drop'"),  # type: ignore[arg-type]
        (lambda: LocalSGD(4, compress="int4"), r"unknown compress 'int4'"),  # type: ignore[arg-type]
        (lambda: LocalSGD(4, compress="int8", exact=False), r"always gathered"),
        (lambda: AllReduce(warmup=3), r"AllReduce\(warmup=3\): gradients are averaged in every"),
        (lambda: StreamingDiLoCo(4, fragments=5), r"fragments=5 in rounds of every=4"),
        (lambda: DiLoCo(4, outer_lr=0), r"outer_lr=0: give a number above 0"),
        (lambda: OverlapLocalSGD(4, momentum=1), r"momentum=1: the anchor would never settle"),
        (lambda: averaging_named("dasdg", every=4), r"Did you mean 'dasgd'"),
        (lambda: averaging_named("dasgd", every=4), r"dasgd needs delay: give DaSGD\(every=...,"),
        (lambda: averaging_named("dasgd", every=4, xi=1), r"dasgd has no setting 'xi'"),
        (lambda: trainer_with(None, replicas=0), r"replicas=0: give a whole number"),
        (lambda: trainer_with(3), r"averaging=3: give an object such as DaSGD"),  # type: ignore[arg-type]
        (
            lambda: trainer_with(StreamingDiLoCo(9, fragments=5), cuts=[2]),
            r"fragments=5, but stage 0 has 1 layers with weights: give at most 1, or cut the model"
            r" into fewer stages",
        ),
        (
            lambda: trainer_with(StreamingDiLoCo(9, fragments=5), stages=1),
            r"fragments=5, but stage 0 has 4 layers with weights: give at most 4\.$",
        ),
        (lambda: LocalSGD(4, offset=4), r"offset=4: .* with every=4 a whole number from -3 to 3"),
        (lambda: StreamingDiLoCo(4, offset=True), r"offset=True: the updates by which averages"),
        (
            lambda: StreamingDiLoCo(9, fragments=[["0", "2"], "4"]),
            r"fragments=\[\['0', '2'\], '4'\]: give a number, or for each fragment the names",
        ),
        (lambda: StreamingDiLoCo(1, fragments=[["0"], ["2"]]), r"fragments=2 in rounds of every=1"),
        (
            lambda: trainer_with(StreamingDiLoCo(9, fragments=[["0", "2"], ["4", "7"]])),
            r"fragments name '7', and the model has no weight .* Its weights: 0.bias, 0.weight, 2",
        ),
        (
            lambda: trainer_with(StreamingDiLoCo(9, fragments=[["0", "2"], ["4"]])),
            r"weight '6.weight' of stage 0 is in no fragment: every weight that is trained",
        ),
        (
            lambda: trainer_with(StreamingDiLoCo(9, fragments=[["0", "2", "4"], ["6", "4.bias"]])),
            r"weight '4.bias' of stage 0 is in fragments 0 and 1",
        ),
        (lambda: DiLoCo(4, outer_optimizer="adam"), r"outer_optimizer='adam': give a function of"),  # type: ignore[arg-type]
        (
            lambda: DiLoCo(4, outer_optimizer=torch.optim.AdamW, outer_lr=0.1),
            r"outer_lr, outer_momentum and nesterov are settings of the one it replaces",
        ),
        (
            lambda: run(DiLoCo(4, outer_optimizer=torch.optim.LBFGS), 1),
            r"outer_optimizer\(params\) returned a LBFGS: return a torch.optim optimizer that",
        ),
        (
            lambda: run(DiLoCo(4, outer_optimizer=lambda p: torch.optim.SGD(p[:3], lr=1.0)), 1),
            r"got 8 parameters and its optimizers hold 3: each must be in exactly one",
        ),
        (lambda: run(DaSGD(4, 1), 1).state_dict(of="global"), r"DaSGD keeps no copy of the"),
        (lambda: run(AllReduce(), 1).state_dict(of="global"), r"AllReduce keeps no copy"),
        (lambda: run(DiLoCo(4), 1).state_dict(of=2), r"of=2: there are 2 replicas, so give"),
        (lambda: run(DiLoCo(4), 1).state_dict(of="mean"), r"unknown of 'mean'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_settings_get_words(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_batch_that_does_not_divide_is_not_started() -> None:
    trainer = trainer_with(AllReduce())
    (x, y), *_ = batches_for(REPLICAS)
    with pytest.raises(BatchError, match=r"a batch of 11 rows does not divide among 3 replicas"):
        trainer.step(x[:11], y[:11])
    assert trainer.step(x, y) is not None


# ------------------------------------------------------------------ data


def test_the_sampler_gives_the_same_rows_in_any_layout() -> None:
    whole = trainer_with(AllReduce(), replicas=2).sampler(10, 4, drop_last=False, seed=3)
    settings: dict[str, Any] = {"shuffle": True, "seed": 3, "drop_last": False, "replicas": 2}
    parts = [Sampler(10, 4, **settings, parts=2, part=part) for part in (0, 1)]
    assert len(whole) == 3
    first, second = list(whole), list(whole)
    assert first != second
    assert sorted(chain.from_iterable(first)) == list(range(10))
    for epoch in (first, second):
        halves = [list(sampler) for sampler in parts]
        assert [a + b for a, b in zip(*halves, strict=True)] == epoch
    whole.epoch = 0
    assert list(whole) == first


@pytest.mark.parametrize(
    ("count", "size", "words"),
    [
        (10, 3, "batch_size=3 rows does not divide among 2 replicas: give a multiple of 2"),
        (11, 4, "a last batch of 3 rows does not divide among 2 replicas.*drop_last=True"),
        (0, 4, "0 rows make no batch of 4"),
    ],
)
def test_a_sampler_that_cannot_divide_says_so(count: int, size: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer_with(AllReduce(), replicas=2).sampler(count, size)


# ------------------------------------------------------------------ whatever joins the list

EVERY = pytest.mark.parametrize("kind", AVERAGINGS, ids=lambda kind: kind.name)
"""Tests of this mark take nothing but a kind and a folder: test_docs.py asks them of its own."""


def case_of(kind: type[Averaging]) -> Case:
    for case in CASES.values():
        if type(case.averaging) is kind:
            return case
    return pytest.fail(
        f"{kind.__name__} has no oracle: write its equation into tests/averaging_oracles.py, and"
        " give it a case in CASES of tests/test_averaging.py (docs/add-an-averaging.md, step 4)."
    )


def example_of(kind: type[Averaging]) -> Averaging:
    return case_of(kind).averaging


def test_whoever_joins_without_an_oracle_is_told_where_it_goes() -> None:
    class Joined(LocalSGD):
        """A rule of its own in the list, and nothing that says what it should do."""

    words = "Joined has no oracle: .*tests/averaging_oracles.py.* in CASES of tests/test_averaging"
    with pytest.raises(pytest.fail.Exception, match=words):
        case_of(Joined)


@EVERY
def test_an_oracle_cites_the_paper_it_is_written_from(kind: type[Averaging]) -> None:
    number = re.search(r"arXiv (\S+)", kind.reference)
    assert number is None or number[1] in str(case_of(kind).oracle.__doc__), kind.reference


@EVERY
def test_one_replica_trains_as_its_oracle_says(kind: type[Averaging]) -> None:
    """Plainly, unless the formula takes something back from a single replica, too."""
    check(case_of(kind), replicas=1)


@EVERY
def test_an_averaging_that_averages_nothing_is_seen(kind: type[Averaging]) -> None:
    """Nothing but zeros, weights that stay, replicas that never meet: no oracle may say so."""
    starts, gradient = [row_of(mlp())] * REPLICAS, gradient_of(mlp(), batches_for(REPLICAS), 3)
    alone = oracles.local_sgd(starts, gradient, STEPS, lr=LR, tau=STEPS + 1)[1:]
    expected = expected_of(case_of(kind))
    for nothing in ([[torch.zeros_like(starts[0])] * 3] * STEPS, [starts] * STEPS, alone):
        with pytest.raises(AssertionError, match="step"):
            assert_close(expected, nothing)


def assert_resumes(averaging: Averaging, folder: Path) -> None:
    """Saved at three steps in a row, of which two at least are in the middle of a round."""
    batches = batches_for(REPLICAS, 12)

    def fresh() -> offbeat.Trainer:
        return trainer_with(averaging, optimizer=OPTIMIZERS["momentum"])

    whole = fresh()
    for step, batch in enumerate(batches, 1):
        whole.step(*batch)
        if step in (4, 5, 6):
            whole.save(folder / str(step), wait=True)
    for step in (4, 5, 6):
        resumed = fresh()
        assert resumed.resume(folder / str(step)).step == step
        for batch in batches[step:]:
            resumed.step(*batch)
        assert all(map(torch.equal, rows_now(resumed), rows_now(whole))), f"saved at step {step}"


@EVERY
def test_a_run_resumed_in_a_round_ends_with_the_same_bits(
    kind: type[Averaging], tmp_path: Path
) -> None:
    assert_resumes(example_of(kind), tmp_path)


@EVERY
def test_what_an_averaging_remembers_is_never_written_to(kind: type[Averaging]) -> None:
    """A checkpoint that is still being written reads the same tensors."""
    trainer = trainer_with(example_of(kind), replicas=2)
    seen: list[tuple[Tensor, Tensor]] = []
    for x, y in batches_for(2, 10):
        trainer.step(x, y)
        for worker in trainer._engine.workers:
            assert worker.averager is not None
            seen += [(t, t.clone()) for t in nest.tensors(worker.averager.snapshot())]
    for tensor, then in seen:
        assert torch.equal(tensor, then)


@EVERY
def test_every_averaging_can_be_built_from_its_name(kind: type[Averaging]) -> None:
    example = example_of(kind)
    required = [field.name for field in fields(kind) if field.default is MISSING]
    settings = {name: getattr(example, name) for name in required}
    assert averaging_named(kind.name.upper(), **settings) == kind(**settings)
    assert kind.title and kind.reference
