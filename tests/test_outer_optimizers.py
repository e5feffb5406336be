"""DiLoCo's outer optimizer, its fragments and its global copy: chosen, read and kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from averaging_oracles import Gradient, History, copies, mean
from helpers import assert_same_bits, mlp
from offbeat.averaging import (
    CO2,
    AllReduce,
    Averaging,
    DaSGD,
    DiLoCo,
    EagerDiLoCo,
    NoLoCo,
    StreamingDiLoCo,
)
from offbeat.errors import ConfigurationError
from offbeat.zoo import network
from test_averaging import (
    Case,
    assert_close,
    batches_for,
    check,
    history_of,
    rows_now,
    run,
    trainer_with,
)

# ------------------------------------------------------------------ any torch optimizer outside


def by_torch(
    starts: Any, gradient: Gradient, steps: int, *, lr: float, tau: int, outer: Any
) -> History:
    """DiLoCo, with the outer step taken by an optimizer that goes on from one round to the next."""
    x, model = copies(starts), mlp()
    theta = list(model.parameters())
    sizes = [p.numel() for p in theta]
    made = outer(theta)
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            now = nn.utils.parameters_to_vector(theta).detach()
            change = mean([now - x_i for x_i in x])
            for p, piece in zip(theta, change.split(sizes), strict=True):
                p.grad = piece.view_as(p).clone()
            for optimizer in made if isinstance(made, list) else [made]:
                optimizer.step()
            x = [nn.utils.parameters_to_vector(theta).detach().clone()] * len(x)
        history.append(copies(x))
    return history


def muon_and_sgd(params: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for p in params if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=0.01),
        torch.optim.SGD([p for p in params if p.dim() != 2], lr=0.5, momentum=0.9),
    ]


OUTER: dict[str, Any] = {
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.7),
    "Nesterov": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "Muon and SGD": muon_and_sgd,
}


@pytest.mark.parametrize("name", OUTER)
def test_the_outer_step_is_that_of_any_torch_optimizer(name: str) -> None:
    """It remembers from round to round, and sees the weights in their own shapes."""
    case = Case(DiLoCo(4, outer_optimizer=OUTER[name]), by_torch, {"tau": 4, "outer": OUTER[name]})
    check(case)


def test_an_outer_optimizer_that_forgets_is_seen(monkeypatch: Any) -> None:
    case = Case(
        DiLoCo(4, outer_optimizer=OUTER["AdamW"]), by_torch, {"tau": 4, "outer": OUTER["AdamW"]}
    )
    check(case)
    monkeypatch.setattr("offbeat.averaging.outer_optimizer._put_back", lambda *_: None)
    with pytest.raises(AssertionError, match="step 8"):
        check(case)


@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_without_momentum_is_plain_sgd_outside(nesterov: bool) -> None:
    """Torch refuses Nesterov without momentum; here it is the same as without Nesterov."""
    own = DiLoCo(4, outer_momentum=0, nesterov=nesterov)
    theirs = DiLoCo(4, outer_optimizer=OUTER["plain SGD"])
    batches = batches_for(3)
    ours = history_of(trainer_with(own), batches)
    expected = history_of(trainer_with(theirs), batches)
    assert all(map(torch.equal, chain(*ours), chain(*expected)))
    check(Case(own, by_torch, {"tau": 4, "outer": OUTER["plain SGD"]}))


def test_diloco_s_own_step_is_torchs_nesterov_to_the_bit() -> None:
    batches = batches_for(3)
    ours = history_of(trainer_with(DiLoCo(4)), batches)
    theirs = history_of(trainer_with(DiLoCo(4, outer_optimizer=OUTER["Nesterov"])), batches)
    assert all(map(torch.equal, chain(*ours), chain(*theirs)))


@pytest.mark.parametrize("name", ["AdamW", "Muon and SGD"])
@pytest.mark.parametrize(
    "averaging",
    [DiLoCo(3), StreamingDiLoCo(3, fragments=2, delay=1), EagerDiLoCo(3)],
    ids=lambda averaging: averaging.title,
)
def test_what_an_outer_optimizer_keeps_is_in_a_checkpoint(
    averaging: Any, name: str, tmp_path: Path
) -> None:
    own = replace(averaging, outer_optimizer=OUTER[name])
    batches = batches_for(2, 11)
    whole = trainer_with(own, replicas=2)
    for step, batch in enumerate(batches, 1):
        whole.step(*batch)
        if step == 5:
            whole.save(tmp_path, wait=True)
    resumed = trainer_with(own, replicas=2)
    for batch in batches[resumed.resume(tmp_path).step :]:
        resumed.step(*batch)
    assert all(map(torch.equal, rows_now(resumed), rows_now(whole)))


def test_a_checkpoint_goes_by_what_a_default_comes_to(tmp_path: Path) -> None:
    """So one of a version with another default is refused, and says what to ask for."""
    batches = batches_for(2, 6)
    for policy, folder in (("keep", "older"), (None, "newer")):
        trainer = trainer_with(DaSGD(4, 1, optimizer_state=policy), replicas=2)  # type: ignore[arg-type]
        for batch in batches[:3]:
            trainer.step(*batch)
        trainer.save(tmp_path / folder, wait=True)
    words = r"optimizer_state=keep.*, and this trainer has DaSGD\(.*optimizer_state=average"
    with pytest.raises(ConfigurationError, match=words):
        trainer_with(DaSGD(4, 1), replicas=2).resume(tmp_path / "older")
    named = trainer_with(DaSGD(4, 1, optimizer_state="average"), replicas=2)
    assert named.resume(tmp_path / "newer").step == 3


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("averaging", "copies", "sent"),
    [
        (AllReduce(), 0, 0),
        (DiLoCo(2), 2, 1),
        (DiLoCo(2, outer_momentum=0), 1, 1),
        (DiLoCo(2, outer_optimizer=torch.optim.AdamW), 3, 1),
        (DaSGD(4, 3, optimizer_state="keep"), 0, 1),
        (DaSGD(4, 3, progress=1.0), 1, 1),
        (DaSGD(4, 3), 0, 2),
        (CO2(4), 2, 1),
    ],
    ids=str,
)
def test_memory_tells_what_an_average_keeps_and_sends(
    averaging: Averaging, copies: int, sent: int
) -> None:
    """After four updates with momentum, in copies of the weights; single numbers come on top."""
    trainer = run(averaging, 4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    weights = sum(p.numel() * 8 for p in mlp().parameters())
    for memory in trainer.memory():
        assert 0 <= memory.averaging_bytes - copies * weights < 100
        assert 0 <= memory.average_sends_bytes - sent * weights < 100


def test_adam_s_moments_triple_what_an_average_sends() -> None:
    averaging = DaSGD(4, 1, optimizer_state="average")
    trainer = run(averaging, 4, optimizer=lambda p: torch.optim.Adam(p))
    weights = sum(p.numel() * 8 for p in mlp().parameters())
    assert 0 <= trainer.memory()[0].average_sends_bytes - 3 * weights < 200


# ------------------------------------------------------------------ fragments


def sizes_of_fragments(model: nn.Module, fragments: Any, **settings: Any) -> list[list[int]]:
    """By stage and fragment how many numbers are in it."""
    trainer = offbeat.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        replicas=2,
        averaging=StreamingDiLoCo(12, fragments=fragments),
        **settings,
    )
    workers = [w for w in trainer._engine.workers if w.stage.replica == 0]
    parts = [w.averager._parts for w in workers if w.averager is not None]
    return [[sum(p.numel() for p in part) for part in own] for own in parts]


def test_fragments_are_runs_of_blocks_about_equally_large() -> None:
    resnet = network("resnet20")
    whole = sum(p.numel() for p in resnet.parameters())
    (two,) = sizes_of_fragments(resnet, 2, stages=1)
    (three,) = sizes_of_fragments(copy.deepcopy(resnet), 3, stages=1)
    assert sum(two) == sum(three) == whole
    assert max(two) < 1.25 * whole / 2
    assert max(three) < 1.25 * whole / 3


def test_a_block_is_divided_only_where_that_makes_the_largest_much_smaller() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    even = nn.Sequential(block, copy.deepcopy(block), copy.deepcopy(block), copy.deepcopy(block))
    assert sizes_of_fragments(even, 2, stages=1) == [[288, 288]]
    assert sizes_of_fragments(nn.Sequential(nn.Sequential(*even)), 4, stages=1) == [[144] * 4]
    uneven = nn.Sequential(nn.Linear(8, 2), copy.deepcopy(block), nn.Linear(8, 2))
    assert sizes_of_fragments(uneven, 2, stages=1) == [[90, 90]]


def test_named_fragments_may_lie_in_any_stage() -> None:
    found = sizes_of_fragments(mlp(), [["0", "6"], ["2", "4"]], cuts=[4])
    assert found == [[56, 63], [28, 48]]
    assert sizes_of_fragments(mlp(), [["0", "2"], ["4", "6"]], cuts=[4]) == [[119, 0], [0, 76]]


def test_fragments_of_other_stages_are_no_work_here() -> None:
    """Cut where fragments meet, every stage averages its own alone, at the same updates."""
    averaging = StreamingDiLoCo(6, fragments=[["0", "2"], ["4", "6"]], delay=2)
    cut = history_of(trainer_with(averaging, cuts=[4]), batches_for(3))
    whole = history_of(trainer_with(averaging), batches_for(3))
    assert_close(cut, whole)


# ------------------------------------------------------------------ every replica can be read


def test_every_replica_and_the_global_copy_can_be_read_and_evaluated() -> None:
    trainer = run(DiLoCo(4), 6)
    rows = rows_now(trainer)
    for replica, row in enumerate(rows):
        state = trainer.state_dict(of=replica)
        assert torch.equal(torch.cat([v.reshape(-1) for v in state.values()]), row)
        lone = mlp()
        lone.load_state_dict(state)
        x, y = batches_for(2, 1)[0]
        expected = float(nn.functional.cross_entropy(lone(x), y).detach())
        assert trainer.evaluate([(x, y)], of=replica).loss == pytest.approx(expected, abs=1e-12)
    assert_same_bits(trainer.state_dict(of="replica"), trainer.state_dict(of=0))
    assert_same_bits(trainer.state_dict(of="global"), run(DiLoCo(4), 4).state_dict())
    assert_same_bits(
        run(DiLoCo(4, warmup=9), 3).state_dict(of="global"), run(AllReduce(), 3).state_dict()
    )


@pytest.mark.parametrize("averaging", [EagerDiLoCo(3), NoLoCo(3), CO2(3)], ids=str)
def test_the_global_copy_is_the_mean_of_the_replicas_own(averaging: Averaging) -> None:
    """Right after a merge a replica stands on its own copy."""
    trainer = run(averaging, 6)
    found = torch.cat([v.reshape(-1) for v in trainer.state_dict(of="global").values()])
    assert (found - sum(rows_now(trainer)) / 2).abs().max() < 1e-15


def test_reading_changes_nothing() -> None:
    plain, read = trainer_with(DiLoCo(3)), trainer_with(DiLoCo(3))
    for batch in batches_for(3):
        read.state_dict(of="global")
        plain.step(*batch)
        read.step(*batch)
    assert all(map(torch.equal, rows_now(plain), rows_now(read)))
