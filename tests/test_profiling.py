"""Cutting by measured time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from helpers import assert_same_bits, cnn, image_batches, trainer_for
from offbeat.cutting import costs
from offbeat.cutting.costs import cut_by_time
from offbeat.cutting.ways import plan_cut
from offbeat.engines.checks import check_balance
from offbeat.errors import ConfigurationError


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * self.weight


def test_time_decides_where_arithmetic_would_not() -> None:
    layers = [Slow(seconds) for seconds in (0.03, 0.03, 0.0, 0.0, 0.0, 0.0)]
    assert cut_by_time(layers, torch.ones(2, 4), 2) == [1]


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = image_batches(1)[0]
    state = torch.get_rng_state()
    trainer = offbeat.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        stages=3,
        balance="measured",
    )
    trainer._pipeline.build(x)
    assert_same_bits(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert trainer.cuts is not None and len(trainer.cuts) == 2
    trainer.step(x, y)


def test_stages_side_by_side_are_charged_for_their_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers alike alone; among others, the first two take five times as long."""
    modules = [nn.Linear(4, 4) for _ in range(8)]
    monkeypatch.setattr(costs, "_Recording", lambda work: work)
    monkeypatch.setattr(costs, "seconds_of", lambda work: 1.0)

    def together(passes: Sequence[Any]) -> list[float]:
        found = []
        for work in passes:
            layers = list(work.module)
            found.append(sum(5.0 if modules.index(layer) < 2 else 1.0 for layer in layers))
        return found

    monkeypatch.setattr(costs, "_seconds_together", together)
    assert cut_by_time(modules, torch.ones(2, 4), 4, side_by_side=True)[:2] == [1, 2]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown balance 'guess'"):
        trainer_for(cnn(), stages=2, balance="guess")
    with pytest.raises(ConfigurationError, match="under processes.*print trainer.cuts"):
        check_balance("measured", "processes", plan_cut(cnn(), stages=2))
