"""One GPU gives the same bits whichever engine runs the stages, and without lag those of PyTorch.

CUDA graphs and streams against the serial engine: every weight, buffer, loss, evaluation and lag.
The serial engine in turn is held against a plain PyTorch loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpu.cases import CASES, NUMBERS, Case, batches_of, compare, loss_of, model_of, sgd
from helpers import assert_same_bits, plain_loop, trained
from offbeat.methods import DSP, GPipe, Method, Synchronous


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_give_the_bits_of_the_serial_engine(case: Case) -> None:
    row = compare(case)
    print(row)  # shown when a comparison fails
    assert row["differing elements"] == 0
    assert row["elements"] > 10_000
    assert row["also the same"] == list(NUMBERS)
    assert row["stages that could not be recorded"] == list(case.unrecorded)


def without_dropout(model: nn.Sequential) -> nn.Sequential:
    """Stages draw their random numbers by stage and batch, a plain loop does not."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.filterwarnings("default")  # what a GPU's kernels say is no error here
@pytest.mark.parametrize("engine", ["serial", "streams"])
@pytest.mark.parametrize("model", ["resnet", "gpt"])
@pytest.mark.parametrize(
    ("method", "micro_batches"),
    [(Synchronous(), 1), (DSP(lag=(0, 0, 0, 0)), 1), (GPipe(2), 2)],
    ids=lambda value: str(value),
)
def test_stages_without_lag_give_the_bits_of_a_plain_loop(
    method: Method, micro_batches: int, model: str, engine: Any
) -> None:
    case = Case(name="plain", method=method, model=model, updates=30)
    network, batches = without_dropout(model_of(case)), batches_of(case)
    plain, losses = plain_loop(
        network, batches, sgd, micro_batches=micro_batches, loss=loss_of(case)
    )
    ours = trained(network, batches, method, sgd, stages=4, engine=engine, loss=loss_of(case))
    assert_same_bits(ours.state_dict(), plain.state_dict())
    assert len(losses) == len(batches)
    assert all(torch.tensor(losses).isfinite())
