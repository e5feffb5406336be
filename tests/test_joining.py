"""A replica that died comes back and joins the others at a step all agree on."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jobs
import offbeat
from helpers import OPTIMIZERS, assert_same_bits, vector_batches
from offbeat.averaging import LocalSGD
from offbeat.errors import ConfigurationError
from offbeat.rng import seed_for
from test_survivors import left_behind

pytestmark = pytest.mark.timeout(300)  # many processes, perhaps on a busy machine


def mean(values: list[Tensor]) -> Tensor:
    """In the order of replicas; exactly the value where all agree."""
    total = values[0].detach().clone()
    if all(torch.equal(total, value) for value in values):
        return total
    for value in values[1:]:
        total += value.detach()
    return total / len(values)


def by_hand(joins: int) -> dict[str, Any]:
    """Three replicas under LocalSGD(2): number 1 misses the steps from 5 to the one it joins at."""
    models = [jobs.dropout_net() for _ in range(3)]
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in models]
    there, round_began = [0, 1, 2], 0

    def average() -> None:
        with torch.no_grad():
            for same in zip(*(models[r].parameters() for r in there), strict=True):
                found = mean(list(same))
                for parameter in same:
                    parameter.copy_(found)

    batches = vector_batches(12, rows=12, dtype=torch.float32) * jobs.EPOCHS
    for step, (x, y) in enumerate(batches):
        if step == 5:
            there = [0, 2]
        if step == joins:
            average()
            models[1] = copy.deepcopy(models[0])
            optimizers[1] = OPTIMIZERS["momentum"](models[1].parameters())
            for same in zip(*(model.parameters() for model in models), strict=True):
                momenta = [optimizers[r].state[same[r]]["momentum_buffer"] for r in (0, 2)]
                optimizers[1].state[same[1]] = {"momentum_buffer": mean(momenta)}
            there, round_began = [0, 1, 2], joins
        for r in there:
            torch.manual_seed(seed_for(3, replica=r, stage=0, micro_batch=step))
            optimizers[r].zero_grad()
            nn.functional.cross_entropy(models[r](x.chunk(3)[r]), y.chunk(3)[r]).backward()
            optimizers[r].step()
        if (step + 1 - round_began) % 2 == 0:
            average()
    average()
    return dict(models[0].state_dict())


def returned(stages: int, stumbles: bool, restart: int) -> tuple[list[dict[str, Any]], int]:
    """What all processes saw, and the step at which replica 1 joined."""
    found = offbeat.launch(
        jobs.come_back, 3 * stages, LocalSGD(2), 3, stages, stumbles,
        timeout_s=200, go_on=True, restart=restart,
    )  # fmt: skip
    assert left_behind() == []
    back = [words for words in found[0]["said"] if "is back" in words]
    step = int(back[-1].split("joins at step ")[1].split(".")[0])
    for rank, result in enumerate(found):
        words = f"stage {rank % stages}: replica 1 is back and joins at step {step}."
        assert f"{words} Averages go on over replica 0, 1, 2." in result["said"]
        first = step if rank // stages == 1 else 0
        assert result["steps"] == list(range(first, 12 * jobs.EPOCHS))
        assert math.isfinite(result["evaluation"].loss)
        assert result["evaluation"] == found[0]["evaluation"]
        assert_same_bits(result["state"], found[0]["state"])
    for stage in range(stages):
        merged = found[stages + stage]["merged"]
        assert len(merged) > 10
        for replica in (0, 2):
            others = found[replica * stages + stage]["merged"]
            assert {version: others[version] for version in merged} == merged
    return found, step


def test_a_replica_joins_by_taking_the_average() -> None:
    found, joins = returned(stages=1, stumbles=False, restart=1)
    assert_same_bits(found[0]["state"], by_hand(joins))


def test_a_replica_of_two_stages_joins_even_if_its_first_return_fails() -> None:
    returned(stages=2, stumbles=True, restart=2)


def test_a_replica_that_comes_too_late_is_left_out() -> None:
    assert offbeat.launch(jobs.end_early, 2, timeout_s=100, go_on=True, restart=1) == [0, None]
    assert left_behind() == []


def test_returns_need_others_to_join() -> None:
    with pytest.raises(ConfigurationError, match=r"restart=1, go_on=False.*others to join"):
        offbeat.launch(jobs.end_early, 2, restart=1)
