"""Agreement with code that others wrote, bit for bit: torch's pipelines, DDP, averagers; torchft.

docs/exactness.md tells where conventions differ.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

import offbeat
import peers
from helpers import OPTIMIZERS, assert_same_bits, trained, trainer_for
from offbeat.averaging import AllReduce, Averaging, LocalSGD, PostLocalSGD, StreamingDiLoCo
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


def replicated(model: str, optimizer: str, averaging: Averaging) -> offbeat.Trainer:
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


@pytest.mark.parametrize(("every", "warmup"), [(2, 1), (3, 2), (2, 0), (3, 0), (3, 1)])
def test_local_sgd_is_torchs_averager(every: int, warmup: int) -> None:
    """Its first average follows update ``warmup`` + 1, which with its default is the very first."""
    averaging = LocalSGD(every, offset=(warmup + 1) % every)
    for optimizer in OPTIMIZERS:
        theirs, _ = offbeat.launch(
            peers.average_periodically, 2, "vectors", optimizer, every, warmup
        )
        ours = replicated("vectors", optimizer, averaging)
        assert_same_bits(ours.state_dict(of=0), theirs)  # not always on an average at the end


@pytest.mark.parametrize("every", [2, 3])
def test_post_local_sgd_is_torchs_optimizer(every: int) -> None:
    for optimizer in OPTIMIZERS:
        theirs, _ = offbeat.launch(peers.post_local, 2, "vectors", optimizer, every, 2)
        ours = replicated("vectors", optimizer, PostLocalSGD(every, switch=2, offset=1))
        assert_same_bits(ours.state_dict(of=0), theirs)


# ------------------------------------------------------------------ torchft's files


class TorchftFile(NamedTuple):
    """What two replicas of two weights are after 0, 1, ... updates, and their global copy."""

    delay: int
    mix: float
    first: list[float]
    second: list[float]
    copies: dict[int, tuple[float, float]]


# The numbers of the six files of torchft's test_diloco_mocked_updates (diloco_regression_test.py;
# H = 6, P = 2, every gradient 2, inner SGD of rate 1, outer SGD of rate 2), where both replicas are
# equal: test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.
# test_diloco_mocked_updates_N.json of github.com/tushar00jain/torchft, at the commit beside each;
# file 3 from torchft/test/fixtures/ there.
TORCHFT = {
    "0, 24d9a81e": TorchftFile(
        0, 0,
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-35, -23), 12: (-35, -47)},
    ),
    "1, f69e778f": TorchftFile(
        0, 0.5,
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-29, -23), 12: (-29, -35)},
    ),
    "2, 7a841231": TorchftFile(
        0, 1,
        [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-23, -23), 12: (-23, -23)},
    ),
    "3, d5f0b323": TorchftFile(
        1, 0,
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-27, -19), 12: (-27, -39), 15: (-47, -39)},
    ),
    "4, 11314afc": TorchftFile(
        1, 0.5,
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-25, -19), 12: (-25, -31), 15: (-38, -31)},
    ),
    "5, 7a841231": TorchftFile(
        1, 1,
        [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        [1, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21, -23, -25, -27, -29],
        {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-23, -19), 12: (-23, -23)},
    ),
}  # fmt: skip


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


@pytest.mark.parametrize("name", TORCHFT)
def test_streaming_diloco_is_torchfts(name: str) -> None:
    file = TORCHFT[name]
    for fragments in (2, [["0"], ["1"]]):
        trainer = offbeat.Trainer(
            nn.Sequential(Shift(), Shift()),
            loss=lambda output, _: 2 * output.mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            replicas=2,
            averaging=StreamingDiLoCo(
                6,
                fragments=fragments,
                delay=file.delay,
                offset=-file.delay,  # theirs says where a fragment is merged
                mix=file.mix,
                outer_lr=2.0,
                outer_momentum=0.0,
            ),
        )
        x = torch.zeros(2, 1)
        for step, expected in enumerate(zip(file.first, file.second, strict=True)):
            for replica in (0, 1):
                found = trainer.state_dict(of=replica).values()
                assert tuple(map(float, found)) == expected, (step, replica)
            if step in file.copies:
                found = trainer.state_dict(of="global").values()
                assert tuple(map(float, found)) == file.copies[step], step
            trainer.step(x, x)
