"""Agreement with code that others wrote, bit for bit: torch's pipelines, DDP and averager.

docs/exactness.md tells where conventions differ.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
import peers
from helpers import OPTIMIZERS, assert_same_bits, trained, trainer_for
from offbeat.averaging import AllReduce, LocalSGD
from offbeat.methods import GPipe, Method, OneFOneB

METHODS: dict[str, type[GPipe] | type[OneFOneB]] = {"GPipe": GPipe, "1F1B": OneFOneB}
PIPELINES = [
    (schedule, model, optimizer, micro_batches)
    for schedule in METHODS
    for model in ("convolutions", "vectors")
    for optimizer in OPTIMIZERS
    for micro_batches in (2, 4)
]


def pipelined(
    schedule: str, model: str, optimizer: str, micro_batches: int, stages: int
) -> dict[str, torch.Tensor]:
    network, batches = peers.job_of(model)
    method: Method = METHODS[schedule](micro_batches=micro_batches)
    cuts = peers.cuts_of(network, stages)
    state: dict[str, torch.Tensor] = trained(
        network, batches, method, OPTIMIZERS[optimizer], cuts=cuts
    ).state_dict()
    return state


@pytest.mark.timeout(200)
@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.long)])
def test_synchronous_pipelines_are_torchs(stages: int) -> None:
    # Its 1F1B needs as many micro-batches as stages.
    cases = [case for case in PIPELINES if case[0] == "GPipe" or case[3] >= stages]
    by_rank = offbeat.launch(peers.pipeline, stages, cases, timeout_s=150)
    for place, case in enumerate(cases):
        theirs = {name: value for rank in by_rank for name, value in rank[place].items()}
        assert_same_bits(pipelined(*case, stages), theirs)


def test_torchs_pipeline_counts_the_first_micro_batch_twice() -> None:
    """Its stages find shapes by running it once more, in training: BatchNorm sees it again."""
    case = ("GPipe", "batch norm", "momentum", 2)
    by_rank = offbeat.launch(peers.pipeline, 2, [case])
    theirs = {name: value for rank in by_rank for name, value in rank[0].items()}
    ours = pipelined(*case, stages=2)
    differing = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    network, batches = peers.job_of("batch norm")
    buffers = {name for name, _ in network.named_buffers()}
    assert differing == buffers
    counters = [name for name in buffers if name.endswith("num_batches_tracked")]
    assert all(int(ours[name]) == 2 * len(batches) for name in counters)
    assert all(int(theirs[name]) == 2 * len(batches) + 1 for name in counters)


def replicated(model: str, optimizer: str, averaging: AllReduce | LocalSGD) -> offbeat.Trainer:
    network, batches = peers.job_of(model)
    trainer = trainer_for(
        nn.Sequential(*network), "synchronous", OPTIMIZERS[optimizer],
        stages=1, replicas=2, averaging=averaging,
    )  # fmt: skip
    for x, y in batches:
        trainer.step(x, y)
    return trainer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_reduce_is_distributed_data_parallel(optimizer: str) -> None:
    for model in ("convolutions", "vectors"):
        theirs, _ = offbeat.launch(peers.data_parallel, 2, model, optimizer)
        ours = replicated(model, optimizer, AllReduce())
        assert_same_bits(ours.state_dict(), theirs)


@pytest.mark.parametrize("every", [2, 3])
def test_local_sgd_is_torchs_averager(every: int) -> None:
    for optimizer in OPTIMIZERS:
        theirs, _ = offbeat.launch(peers.average_periodically, 2, "vectors", optimizer, every)
        ours = replicated("vectors", optimizer, LocalSGD(every))
        assert_same_bits(ours.state_dict(), theirs)
