"""The traps of traps.md: what users of pipelines run into, closed or refused with words."""

from __future__ import annotations

import copy
import re
from collections import defaultdict, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jobs
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
from offbeat.corrections import Correction, Predict, Rewind
from offbeat.errors import ConfigurationError, StageError
from offbeat.methods import (
    ADL,
    DSP,
    RULES,
    FeaturesReplay,
    GPipe,
    Method,
    PipeDream,
    PipeDream2BW,
    Rule,
    StaleWeights,
    Synchronous,
)
from offbeat.stages.versions import overlapping


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


# ------------------------------------------------------------------ what travels between stages

Pair = namedtuple("Pair", ["left", "right"])


class Packs(nn.Module):
    """Passes on tensors, an integer tensor, None and plain values in one nest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        order = torch.arange(6).flip(0)
        return {"pair": Pair(self.linear(x), [x, order]), "none": None, "scale": 2.0}


class Unpacks(nn.Module):
    """Uses the skip tensor and ignores half of the pair's gradient path now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: Any) -> Any:
        left, (skip, order) = given["pair"]
        assert given["none"] is None
        return self.linear(left[:, order]) * given["scale"] + skip, order


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, given: Any) -> Tensor:
        x, order = given
        result: Tensor = self.linear(x[:, order])
        return result


@pytest.mark.parametrize("method", [Synchronous(), *(DSP((0, 0, 0), backward=r) for r in RULES)])
def test_nests_none_integers_and_skips_cross_stages(method: Method) -> None:
    torch.manual_seed(0)
    stages = [Packs(), Unpacks(), Ends()]
    batches = vector_batches(4, dtype=torch.float32)
    expected, _ = plain_loop(nn.Sequential(*stages), batches)
    assert_same_bits(trained(stages, batches, method).state_dict(), expected.state_dict())


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights(), DSP(), ADL(2)])
def test_nests_cross_stages_with_lag(method: Method) -> None:
    torch.manual_seed(0)
    trainer = trained([Packs(), Unpacks(), Ends()], vector_batches(6, dtype=torch.float32), method)
    assert all(torch.isfinite(value).all() for value in trainer.state_dict().values())


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights(), DSP(), PipeDream2BW(), GPipe(2)])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_stages_without_parameters(method: Method, empty: int) -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)]
    stages[empty] = nn.Flatten() if empty < 2 else Lambda(lambda x: x[:, :4])
    for clip in (None, 0.1):
        trainer = trained(stages, vector_batches(6, dtype=torch.float32), method, clip=clip)
        assert len(trainer.state_dict()) == 4


def test_a_frozen_first_stage_gets_no_gradient_and_does_not_move() -> None:
    model = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    expected, _ = plain_loop(model, vector_batches(4))
    assert_same_bits(
        trained(model, vector_batches(4), cuts=[2, 4]).state_dict(), expected.state_dict()
    )
    moved = trained(model, vector_batches(4), StaleWeights(), cuts=[2, 4]).state_dict()
    assert torch.equal(moved["0.weight"], model[0].weight)  # type: ignore[arg-type]


# ------------------------------------------------------------------ weights in one memory


def in_one_memory(kind: str) -> nn.Sequential:
    """Two layers of the first stage whose weights are apart, or views of one tensor."""
    torch.manual_seed(0)
    one, other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    both = torch.stack([one.weight.detach(), other.weight.detach()])
    if kind == "rows":
        one.weight, other.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    if kind == "columns":
        both = both.transpose(0, 1).contiguous().transpose(0, 1)
        one.weight, other.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    if kind == "half frozen":
        one.weight, other.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    if kind == "overlapping":
        other.weight = nn.Parameter(one.weight.detach())
    if kind == "tied":
        other.weight = one.weight
    if kind in ("half frozen", "frozen apart"):
        other.weight.requires_grad_(False)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 6), one, nn.Tanh(), other), nn.Linear(6, 5), nn.Linear(5, 4)
    )


def trainer_in_place(
    model: nn.Sequential, method: Method, corrections: Sequence[Correction] = ()
) -> offbeat.Trainer:
    """Over the model itself: a copy of it has memory of its own for every weight."""
    return offbeat.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS["momentum"],
        method=method,
        corrections=corrections,
        cuts=[1, 2],
    )


LAGGING: list[Method] = [
    *(StaleWeights(backward=rule) for rule in RULES),
    *(PipeDream2BW(backward=rule) for rule in RULES),
]


@pytest.mark.parametrize("method", LAGGING, ids=str)
@pytest.mark.parametrize("kind", ["rows", "columns", "half frozen"])
def test_weights_that_share_memory_train_as_others(
    method: Method, kind: str, tmp_path: Path
) -> None:
    batches = vector_batches(8, dtype=torch.float32)
    apart = in_one_memory("frozen apart" if kind == "half frozen" else "apart")
    expected = trained(apart, batches, method, cuts=[1, 2]).state_dict()
    ours = trainer_in_place(in_one_memory(kind), method)
    for place, batch in enumerate(batches):
        ours.step(*batch)
        if place == 3:
            ours.save(tmp_path, wait=True)
    resumed = trainer_in_place(in_one_memory(kind), method)
    resumed.resume(tmp_path)
    for batch in batches[4:]:
        resumed.step(*batch)
    for trainer in (ours, resumed):
        trainer.flush()
        assert_same_bits(trainer.state_dict(), expected)


@pytest.mark.parametrize("correction", [Predict(), Rewind()])
def test_weights_that_share_memory_are_lent_as_others(correction: Correction) -> None:
    ends = []
    for kind in ("apart", "rows"):
        trainer = trainer_in_place(in_one_memory(kind), StaleWeights(), [correction])
        for batch in vector_batches(8, dtype=torch.float32):
            trainer.step(*batch)
        trainer.flush()
        ends.append(trainer.state_dict())
    assert_same_bits(*ends)


@pytest.mark.parametrize("method", LAGGING, ids=str)
def test_weights_that_overlap_are_refused_where_versions_are_kept(method: Method) -> None:
    tied, overlapping = (
        trainer_in_place(in_one_memory(kind), method) for kind in ("tied", "overlapping")
    )
    batches = vector_batches(8, dtype=torch.float32)
    for batch in batches:
        tied.step(*batch)
    if method in (StaleWeights(backward="current"), StaleWeights(backward="recompute")):
        for batch in batches:  # one memory throughout, as in plain training
            overlapping.step(*batch)
        return
    words = r"stage 0: '0.1.weight' and '0.3.weight'.*the same memory.*clone"
    with pytest.raises(StageError, match=words):
        overlapping.step(*batches[0])


def test_without_lag_weights_may_overlap_and_stay_where_they_are() -> None:
    batches = vector_batches(4, dtype=torch.float32)
    trainer = trainer_in_place(in_one_memory("overlapping"), Synchronous())
    shared = trainer.model[0][1].weight.data_ptr()  # type: ignore[index]
    for batch in batches:
        trainer.step(*batch)
    assert torch.equal(*(trainer.state_dict()[f"0.{layer}.weight"] for layer in (1, 3)))
    assert trainer.model[0][3].weight.data_ptr() == shared  # type: ignore[index]


def in_two_stages(kind: str = "overlapping") -> nn.Sequential:
    """Three stages, of which the outer two have weights in one memory, and perhaps the same."""
    torch.manual_seed(0)
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    if kind == "rows":
        both = torch.stack([one.weight.detach(), other.weight.detach()])
        one.weight, other.weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    else:
        other.weight = nn.Parameter(one.weight.detach())
    if kind == "frozen":
        one.weight.requires_grad_(False)
        other.weight.requires_grad_(False)
    return nn.Sequential(one, nn.Linear(6, 6), other)


ACROSS = "'0.weight' and '2.weight'.*the same memory.*stages 0 and 2 update their own.*both modules"


@pytest.mark.parametrize("method", LAGGING, ids=str)
def test_weights_of_two_stages_may_share_memory_and_not_overlap(method: Method) -> None:
    with pytest.raises(ConfigurationError, match=ACROSS):
        trainer_in_place(in_two_stages(), method)
    for kind in ("rows", "frozen"):
        ends = []
        for model in (in_two_stages(kind), copy.deepcopy(in_two_stages(kind))):
            trainer = trainer_in_place(model, method)
            for batch in vector_batches(6, dtype=torch.float32):
                trainer.step(*batch)
            trainer.flush()
            ends.append(trainer.state_dict())
        assert_same_bits(*ends)


def test_without_lag_weights_of_two_stages_may_overlap_in_one_process() -> None:
    batches = vector_batches(4, dtype=torch.float32)
    trainer = trainer_in_place(in_two_stages(), Synchronous())
    before = trainer.state_dict()["0.weight"]
    for batch in batches:
        trainer.step(*batch)
    one, other = (trainer.model.get_parameter(f"{stage}.weight") for stage in (0, 2))
    assert one.data_ptr() == other.data_ptr()
    assert not torch.equal(one, before)


def words_of_a_refusal(cuts: Sequence[Any]) -> str:
    model = in_two_stages() if cuts == [1, 2] else tower_in_one_memory(0, 1, 3)
    try:
        trainer = offbeat.Trainer(
            model, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["momentum"], cuts=cuts
        )
        trainer.step(*vector_batches(1, dtype=torch.float32)[0])
    except ConfigurationError as error:
        return str(error)
    return ""


def tower_in_one_memory(*blocks: int) -> nn.Module:
    model = jobs.tower()
    linears = [model.get_submodule(f"blocks.{block}.linear") for block in blocks]
    for linear in linears[1:]:
        linear.weight = nn.Parameter(linears[0].weight.detach())  # type: ignore[operator]
    return model


@pytest.mark.parametrize("cuts", [[1, 2], ["blocks.2", "blocks.3"]], ids=str)
def test_processes_refuse_weights_that_overlap_alike(cuts: list[Any]) -> None:
    words = set(offbeat.launch(words_of_a_refusal, 3, cuts, timeout_s=100))
    assert len(words) == 1
    found = ACROSS if cuts == [1, 2] else "'blocks.1.linear.weight' and 'blocks.3.linear.weight'"
    assert re.search(found, words.pop())


def test_weights_that_overlap_have_the_model_s_names() -> None:
    trainer = offbeat.Trainer(
        tower_in_one_memory(0, 1),
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS["momentum"],
        method=PipeDream(),
        cuts=["blocks.2"],
    )
    words = "stage 0: 'blocks.0.linear.weight' and 'blocks.1.linear.weight'"
    with pytest.raises(StageError, match=words):
        trainer.step(*jobs.tower_batches()[0])


def test_replicas_of_one_process_refuse_weights_that_overlap() -> None:
    """Copies of a model have memory of their own for every weight."""
    with pytest.raises(ConfigurationError, match=r"'0.1.weight' and '0.3.weight'.*replicas are"):
        offbeat.Trainer(
            in_one_memory("overlapping"),
            loss=nn.functional.cross_entropy,
            optimizer=OPTIMIZERS["momentum"],
            replicas=2,
            cuts=[1, 2],
        )


def test_sparse_and_lazy_weights_are_not_asked_for_their_memory() -> None:
    lazy, sparse = nn.LazyLinear(3), nn.Parameter(torch.eye(3).to_sparse())
    assert not list(overlapping([*lazy.named_parameters(), ("sparse", sparse)]))


# ------------------------------------------------------------------ in-place layers


@pytest.mark.parametrize("rule", RULES)
def test_an_in_place_layer_may_come_first_in_a_stage(rule: Rule) -> None:
    """A leaf error in plain autograd, or a stored input overwritten before it is recomputed."""
    stages = {}
    for inplace in (False, True):
        torch.manual_seed(0)
        stages[inplace] = [
            nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(6, 8)),
            nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(8, 8)),
            nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(8, 4)),
        ]
    batches = vector_batches(6, dtype=torch.float32)
    kept = [(x.clone(), y) for x, y in batches]
    one, other = (
        trained(stages[inplace], batches, StaleWeights(backward=rule)) for inplace in (False, True)
    )
    assert_same_bits(one.state_dict(), other.state_dict())
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(batches, kept, strict=True))


@pytest.mark.parametrize("rule", ["stash", "current"])
def test_changing_a_saved_tensor_in_place_is_refused_as_in_plain_pytorch(rule: Rule) -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.linear(x))  # the backward of tanh needs its output
            y.mul_(2)
            return y

    trainer = trainer_for([Spoils(), nn.Linear(6, 4)], StaleWeights(backward=rule))
    with pytest.raises(StageError, match="changed by an in-place operation"):
        for x, y in vector_batches(4, dtype=torch.float32):
            trainer.step(x, y)


# ------------------------------------------------------------------ weights in disguise


@pytest.mark.parametrize("kind", ["weight_norm", "product"])
def test_tensors_derived_from_weights_are_refused_under_current(kind: str) -> None:
    """They look like activations, so the backward would quietly see old weights."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight * self.scale)

    def first() -> nn.Module:
        if kind == "product":
            return nn.Sequential(nn.Linear(6, 6), Product())
        normed: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        return normed

    batches = vector_batches(4, dtype=torch.float32)
    trainer = trainer_for([first(), nn.Linear(6, 4)], StaleWeights())
    with pytest.raises(StageError, match="from weights alone.*Use backward='stash'"):
        trainer.step(*batches[0])
    for rule in ("stash", "recompute"):
        trained([first(), nn.Linear(6, 4)], batches, StaleWeights(backward=rule))


def test_an_embedding_is_no_derived_weight() -> None:
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6)),
        nn.Sequential(nn.Flatten(), nn.Linear(18, 4)),
    ]
    batches = [(torch.randint(9, (5, 3)), torch.randint(4, (5,))) for _ in range(4)]
    trained(stages, batches, StaleWeights())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_left_alone_without_lag(reentrant: bool) -> None:
    """With lag, ``test_inspection.py`` has it."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.linear, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    x, y = vector_batches(1, dtype=torch.float32)[0]
    stages = [nn.Sequential(nn.Linear(6, 6), Checkpointed()), nn.Linear(6, 4)]
    trainer_for(stages, Synchronous()).step(x, y)
    if not reentrant:  # which warns whenever it runs without gradients, as a first pass does
        trainer_for(stages, StaleWeights(backward="recompute")).step(x, y)


# ------------------------------------------------------------------ mixed precision


@pytest.mark.parametrize("rule", RULES)
def test_autocast_without_lag_equals_a_plain_autocast_loop(rule: Rule) -> None:
    batches = vector_batches(4, dtype=torch.float32)
    model = mlp(dtype=torch.float32)
    reference = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](reference.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(reference(x), y)
        loss.backward()
        optimizer.step()
    trainer = trained(
        model, batches, DSP((0, 0, 0), backward=rule), cuts=[2, 4], autocast=torch.bfloat16
    )
    assert_same_bits(trainer.state_dict(), reference.state_dict())


def by_hand_in_bf16(
    stages: list[nn.Module], batches: list[tuple[Tensor, Tensor]], rule: str, lr: float
) -> list[Tensor]:
    """Linear, ReLU, linear as stage 0 and a linear stage 1 in bfloat16, lag (2, 0), plain SGD.

    The gradient of the first layer passes through the second layer's weight: the old one or the
    newest, by the rule. ReLU and matrix products only, so that nothing depends on rounding order.
    """
    half = torch.bfloat16
    a, b, c = (p.detach().clone() for stage in stages for p in stage.parameters())
    versions, flights = [(a, b)], []
    for n, (x, y) in enumerate(batches):
        old_a, old_b = versions[max(0, n - 2)]
        h = torch.relu(x.to(half) @ old_a.to(half).T)
        boundary = (h @ old_b.to(half).T).detach().requires_grad_()
        top = c.clone().requires_grad_()
        nn.functional.cross_entropy((boundary @ top.to(half).T).float(), y).backward()
        assert top.grad is not None and boundary.grad is not None
        c = c - lr * top.grad
        flights.append((x.to(half), h, old_b, boundary.grad))
        ended = n == len(batches) - 1
        for xh, h, old_b, g in flights[max(0, n - 2) : n + 1 if ended else max(0, n - 1)]:
            a, b = versions[-1]
            through = (b if rule == "current" else old_b).to(half)
            gh = (g @ through) * (h > 0)
            versions.append((a - lr * (gh.T @ xh).float(), b - lr * (g.T @ h).float()))
    return [*versions[-1], c]


@pytest.mark.parametrize("rule", ["stash", "current"])
def test_autocast_keeps_the_declared_rule(rule: Rule) -> None:
    """Autocast saves a bfloat16 copy of each weight: ``current`` would become ``stash``."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False)),
        nn.Sequential(nn.Linear(5, 4, bias=False)),
    ]
    batches = vector_batches(6, dtype=torch.float32)
    expected = {r: by_hand_in_bf16(stages, batches, r, lr=0.5) for r in ("stash", "current")}
    assert (expected["stash"][0] - expected["current"][0]).abs().max() > 1e-3
    trainer = trained(
        stages,
        batches,
        StaleWeights(backward=rule),
        lambda p: torch.optim.SGD(p, lr=0.5),
        autocast=torch.bfloat16,
    )
    for ours, theirs in zip(trainer.state_dict().values(), expected[rule], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# ------------------------------------------------------------------ buffers


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights(), DSP(), FeaturesReplay()])
def test_batchnorm_statistics_move_once_per_batch(method: Method) -> None:
    trainer = trained(cnn(), image_batches(7), method, cuts=[3, 5])
    assert int(trainer.state_dict()["1.num_batches_tracked"]) == 7
    assert int(trainer.state_dict()["3.norm.num_batches_tracked"]) == 7


def test_batchnorm_statistics_under_recompute_are_those_of_one_pass() -> None:
    """BatchNorm writes them without a version count; with still weights both rules must agree."""
    states = [
        trained(
            cnn(), image_batches(7), StaleWeights(backward=rule),
            lambda p: torch.optim.SGD(p, lr=0.0), cuts=[3, 5],
        ).state_dict()
        for rule in RULES
    ]  # fmt: skip
    for state in states[1:]:
        assert_same_bits(state, states[0])


def test_batchnorm_statistics_move_once_per_micro_batch() -> None:
    trainer = trained(cnn(), image_batches(5), ADL(3), cuts=[3, 5])
    assert int(trainer.state_dict()["1.num_batches_tracked"]) == 15


def test_under_recompute_the_recomputation_is_what_counts() -> None:
    """After step n stage 0 has recomputed n - lag batches, and counts only those."""
    trainer = trainer_for(cnn(), DSP(), cuts=[3, 5])
    for x, y in image_batches(6):
        trainer.step(x, y)
    assert int(trainer.state_dict()["1.num_batches_tracked"]) == 2


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_weight_copies_are_the_formulas(stages: int) -> None:
    expected: list[tuple[Method, list[int]]] = [
        (Synchronous(), [1] * stages),
        (PipeDream(), [stages - k for k in range(stages)]),
        (StaleWeights(), [1] * stages),
        (StaleWeights(backward="stash"), [2 * (stages - 1 - k) + 1 for k in range(stages)]),
        (DSP(), [1] * stages),
        (PipeDream2BW(), [2] * stages),
        (ADL(2), [stages - k for k in range(stages)]),
    ]
    for method, copies in expected:
        # Two layers a stage: the first layer of a network never needs its weights backward.
        two = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(stages)]
        trainer = trainer_for(two, method)
        for x, y in vector_batches(12, dtype=torch.float32):
            trainer.step(x, y)
        assert [m.peak_weight_copies for m in trainer.memory()] == copies, method
        if method != ADL(2):  # whose last copy lives within a step only
            assert [m.weight_copies for m in trainer.memory()] == copies, method


@pytest.mark.parametrize("rule", RULES)
def test_graphs_and_inputs_in_flight_are_the_lag(rule: Rule) -> None:
    trainer = trainer_for(mlp(), StaleWeights(backward=rule), cuts=[2, 4])
    for x, y in vector_batches(9):
        trainer.step(x, y)
    memory = trainer.memory()
    held = [m.inputs if rule == "recompute" else m.graphs for m in memory]
    assert held == [4, 2, 0]
    assert [m.graphs + m.inputs for m in memory] == [4, 2, 0]
    assert [m.peak_in_flight for m in memory] == [5, 3, 1]
    trainer.flush()
    assert [m.graphs + m.inputs for m in trainer.memory()] == [0, 0, 0]
    assert all(m.in_flight_bytes == 0 and m.weight_copies == 1 for m in trainer.memory())


def test_bytes_held_are_counted_on_storages() -> None:
    """One linear stage keeps its input and nothing else; the stash keeps old weights besides."""
    stages = [nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False)]
    trainers = {
        rule: trainer_for(stages, StaleWeights(backward=rule), OPTIMIZERS["sgd"]) for rule in RULES
    }
    for trainer in trainers.values():
        for x, y in vector_batches(8, rows=10, dtype=torch.float32):
            trainer.step(x, y)
    weights, inputs = 6 * 6 * 4, 2 * 10 * 6 * 4
    first = {rule: trainer.memory()[0] for rule, trainer in trainers.items()}
    assert first["current"].weight_bytes == first["recompute"].weight_bytes == weights
    assert first["recompute"].in_flight_bytes == first["current"].in_flight_bytes == inputs
    # A linear first stage needs no weight in its backward, so even the stash holds no copy.
    assert first["stash"].weight_bytes == weights


# ------------------------------------------------------------------ words


def test_a_stage_that_returns_no_tensor() -> None:
    trainer = trainer_for([Lambda(lambda x: None), nn.Linear(6, 4)])
    with pytest.raises(StageError, match=r"stage 0 \(Lambda\) returned NoneType without a tensor"):
        trainer.step(*vector_batches(1, dtype=torch.float32)[0])


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda output, y: nn.functional.cross_entropy(output, y, reduction="none"), r"\(6,\)"),
        (lambda output, y: 1.0, "float"),
        (lambda output, y: y.sum(), r"\(\)"),
    ],
)
def test_a_loss_that_is_no_scalar(loss: Any, found: str) -> None:
    trainer = trainer_for(mlp(), loss=loss)
    before = trainer.state_dict()
    with pytest.raises(StageError, match=f"it returned {found}. Reduce it"):
        trainer.step(*vector_batches(1)[0])
    assert_same_bits(trainer.state_dict(), before)


def test_a_stage_that_hides_tensors_in_an_object() -> None:
    @dataclass
    class Hidden:
        skip: Tensor

    stages = [Lambda(lambda x: (x, Hidden(x))), nn.Linear(6, 4, dtype=torch.float32)]
    with pytest.raises(StageError, match="returned a Hidden, in which tensors could hide"):
        trainer_for(stages).step(*vector_batches(1, dtype=torch.float32)[0])


def test_any_kind_of_dict_travels() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Any:
            return defaultdict(list, {"x": self.linear(x)})

    torch.manual_seed(0)
    stages = [Packed(), Lambda(lambda given: given["x"] + len(given["missing"]))]
    trained(stages, vector_batches(4, dtype=torch.float32), StaleWeights())


def test_an_error_says_where_it_happened() -> None:
    trainer = trainer_for([nn.Linear(6, 5), nn.Linear(6, 4)])
    with pytest.raises(RuntimeError) as caught:
        trainer.step(*vector_batches(1, dtype=torch.float32)[0])
    assert caught.value.__notes__ == ["offbeat: this happened at 1F0 (stage, action, batch)."]
