"""Replicas times stages in processes: the bits of one process, and clear ends."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import jobs
import offbeat
from helpers import OPTIMIZERS, assert_same_bits, trainer_for
from offbeat.averaging import (
    AVERAGINGS,
    CO2,
    DPSGD,
    AllReduce,
    Averaging,
    DaSGD,
    DiLoCo,
    EagerDiLoCo,
    HierarchicalSGD,
    LocalSGD,
    NoLoCo,
    PostLocalSGD,
    StreamingDiLoCo,
)
from offbeat.errors import BatchError, ConfigurationError, WorkerLost
from offbeat.faults import Faults
from offbeat.methods import ADL, DSP, Method, StaleWeights, Synchronous
from offbeat.transport.base import Key
from offbeat.transport.groups import Collectives
from offbeat.transport.link import Connection
from test_averaging import example_of
from test_docs import AVERAGE, blocks

Job = tuple[str, Method, Averaging, int, int, dict[str, Any]]

UNEVEN = Faults().slow(by=20.0, probability=0.3, seed=1)

TIMES_STAGES: list[Job] = [
    ("cnn", StaleWeights(), DaSGD(3, 1), 2, 2, {}),
    ("dropout", StaleWeights(), DaSGD(3, 2, 0.5, 1.0), 2, 2, {"faults": UNEVEN}),
    ("cnn", DSP(hop=2), DaSGD(2, 2), 2, 2, {"faults": UNEVEN}),
    ("cnn", ADL(2), DaSGD(3, 1, optimizer_state="average"), 2, 2, {}),
    ("dropout", ADL(2), StreamingDiLoCo(4, fragments=2, delay=1), 2, 2, {}),
    ("cnn", Synchronous(), AllReduce(), 2, 2, {"clip": 0.3}),
    ("cnn", StaleWeights(), EagerDiLoCo(2, compress="int8"), 2, 2, {}),
    ("cnn", StaleWeights(), CO2(2, compress="bf16"), 2, 2, {"autocast": torch.bfloat16}),
]
ALONE: list[Job] = [
    ("cnn", Synchronous(), AllReduce(), 4, 1, {}),
    ("dropout", Synchronous(), DaSGD(3, 1), 4, 1, {"faults": UNEVEN}),
    ("cnn", Synchronous(), DiLoCo(3), 4, 1, {}),
    ("cnn", Synchronous(), PostLocalSGD(2, switch=3, statistics="local"), 4, 1, {}),
    ("cnn", Synchronous(), LocalSGD(2, optimizer_state="reset"), 4, 1, {}),
]


def whatever_else_joins() -> list[Job]:
    tried = {type(job[2]) for job in TIMES_STAGES}
    examples = [example_of(kind) for kind in AVERAGINGS if kind not in tried]
    return [("dropout", StaleWeights(), example, 2, 2, {}) for example in examples]


def among_some(gossip: Averaging) -> list[Job]:
    """Four replicas, of which not all average with all."""
    ring = DPSGD(2, optimizer_state="average")
    some = [gossip, NoLoCo(2), ring, HierarchicalSGD(2, size=2, rounds=2), NoLoCo(2, size=3)]
    return [("dropout", StaleWeights(), averaging, 4, 1, {}) for averaging in some]


@pytest.fixture
def gossip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Averaging:
    """The worked example of docs/add-an-averaging.md, in a file that processes can import."""
    (tmp_path / "gossip_of_the_page.py").write_text(blocks(AVERAGE, "python")[0].text)
    monkeypatch.syspath_prepend(tmp_path)
    made: Averaging = importlib.import_module("gossip_of_the_page").Gossip(2)
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ("2 x 2", 4),
        ("2 x 2", 2),
        ("2 x 3", 4),
        ("4 x 1", 2),
        pytest.param("4 x 1", 4, marks=pytest.mark.long),
    ],
)
def test_processes_give_the_bits_of_one(layout: str, processes: int, gossip: Averaging) -> None:
    """Replicas times stages: one of each in a process, several stages, or several replicas."""
    todo = ALONE
    if layout == "2 x 2":
        todo = [*TIMES_STAGES, *whatever_else_joins(), *among_some(gossip)]
    elif layout == "2 x 3":
        whole = [job for job in TIMES_STAGES if not isinstance(job[2], StreamingDiLoCo)]
        todo = [(*job[:4], 3, job[5]) for job in whole]
    by_rank = offbeat.launch(jobs.train_all_replicas, processes, todo, timeout_s=240)
    for place, job in enumerate(todo):
        settings = {name: value for name, value in job[5].items() if name != "faults"}
        alone = jobs.train_replicas(*job[:5], **settings)
        for rank in range(processes):
            ours = by_rank[rank][place]
            assert_same_bits(ours["before"], alone["before"])
            assert_same_bits(ours["after"], alone["after"])
            for name in ("evaluations", "lags", "losses", "merges"):
                assert ours[name] == alone[name], (job, rank, name)


def count_messages(averaging: Averaging) -> dict[str, int]:
    """What this process sends to each other one in six updates of its own replica."""
    network, batches = jobs.job_of("dropout")
    trainer = trainer_for(network, stages=1, replicas=4, averaging=averaging)
    sent: Counter[str] = Counter()
    put = Connection.put

    def counted(self: Connection, key: Key, message: Any) -> None:
        sent[f"{key.what} to {self.threads[0].name.rpartition('-')[2]}"] += 1
        put(self, key, message)

    gathered = Collectives.gather

    def to_all(self: Collectives, key: Key, parts: Any, *, summed: bool) -> None:
        sent[f"{key.what} to all"] += 1
        gathered(self, key, parts, summed=summed)

    Connection.put, Collectives.gather = counted, to_all  # type: ignore[method-assign]
    try:
        for x, y in trainer.batches((batches * 2)[:6]):
            trainer.step(x, y)
    finally:
        Connection.put, Collectives.gather = put, gathered  # type: ignore[method-assign]
    return dict(sent)


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        (LocalSGD(2), [{"weights to all": 3}] * 4),
        (DPSGD(2), [{f"weights to {(r + s) % 4}": 3 for s in (-1, 1)} for r in range(4)]),
        (HierarchicalSGD(1, size=2, rounds=9), [{f"weights to {r ^ 1}": 6} for r in range(4)]),
    ],
    ids=str,
)
def test_weights_are_sent_to_those_alone_who_average_them(
    averaging: Averaging, expected: list[dict[str, int]]
) -> None:
    assert offbeat.launch(count_messages, 4, averaging, timeout_s=200) == expected


def average_moments_of_some() -> list[dict[str, Any]]:
    """Replica 0's first update is dropped, so that replica 1 alone has moments to send."""
    found = []
    for name in ("momentum", "adamw"):
        network, batches = jobs.job_of("dropout")
        batches[0][0][: len(batches[0][0]) // 2] = torch.nan
        trainer = trainer_for(
            network,
            Synchronous(),
            OPTIMIZERS[name],
            stages=1,
            replicas=2,
            averaging=DaSGD(1, 1, optimizer_state="average"),
            guards=offbeat.Guards(nonfinite="roll-back"),
        )
        for x, y in trainer.batches(batches[:-1]):
            trainer.step(x, y)
        trainer.flush()
        found.append(trainer.state_dict())
    return found


def test_moments_of_some_replicas_are_averaged_in_processes_as_in_one() -> None:
    alone = average_moments_of_some()
    for ours in offbeat.launch(average_moments_of_some, 2, timeout_s=100):
        for state, expected in zip(ours, alone, strict=True):
            assert_same_bits(state, expected)


@pytest.mark.long
def test_all_reduce_in_fast_mode_is_close() -> None:
    """An all-reduce may sum in another order, so it is compared with a tolerance."""
    averagings: list[Averaging] = [AllReduce(exact=False), DaSGD(3, 1, exact=False)]
    todo: list[Job] = [("cnn", Synchronous(), averaging, 4, 1, {}) for averaging in averagings]
    (ours, *_) = offbeat.launch(jobs.train_all_replicas, 4, todo)
    for job, found in zip(todo, ours, strict=True):
        exact = jobs.train_replicas(job[0], job[1], replace(job[2], exact=True), *job[3:5])
        for name, value in exact["after"].items():
            assert torch.allclose(found["after"][name], value, atol=1e-6), name


def test_all_reduce_is_what_ddp_computes() -> None:
    (theirs, _) = offbeat.launch(jobs.train_with_ddp, 2)
    ours = jobs.train_replicas("cnn", Synchronous(), AllReduce(statistics="local"), 2, 1)
    for name, value in theirs.items():
        assert torch.allclose(ours["after"][name], value, atol=1e-6), name


def test_the_sampler_reads_each_row_once() -> None:
    alone = jobs.read_by_sampler()
    for state in offbeat.launch(jobs.read_by_sampler, 4):
        assert_same_bits(state, alone)


def test_the_mesh_has_two_axes() -> None:
    found = offbeat.launch(jobs.look_at_mesh, 4)
    assert [tuple(place) for _, _, place, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(other[:2] == (("replica", "stage"), (2, 2)) for other in found)
    assert all(other[3] == 2 for other in found)


def test_the_same_batch_everywhere_is_refused() -> None:
    with pytest.raises(BatchError, match=r"replicas 0 and 1 were fed the same batch.*batches"):
        offbeat.launch(jobs.feed_everyone_alike, 2)


def test_a_wrong_number_of_processes_is_named() -> None:
    job: Job = ("cnn", StaleWeights(), DaSGD(2, 1), 2, 2, {})
    with pytest.raises(ConfigurationError, match=r"replicas=2 times 2 stages .* the 3 processes"):
        offbeat.launch(jobs.train_all_replicas, 3, [job])


def test_a_replica_that_dies_ends_the_run_with_words() -> None:
    with pytest.raises(WorkerLost, match=r"(rank 1|process 1|replica).*"):
        offbeat.launch(jobs.lose_a_replica, 2, timeout_s=60)


@pytest.mark.parametrize("averaging", [AllReduce(), LocalSGD(2)])
def test_what_is_frozen_later_is_frozen_in_every_replica(averaging: Averaging) -> None:
    network, batches = jobs.job_of("dropout")
    trainer = trainer_for(network, cuts=[3], replicas=2, averaging=averaging)
    stages = [worker.stage for worker in trainer._engine.workers if worker.stage.index == 0]
    first = [stage.module[0] for stage in stages]  # type: ignore[index]
    for x, y in batches[:2]:
        trainer.step(x, y)
    assert len(first) == 2
    before = [[p.detach().clone() for p in layer.parameters()] for layer in first]
    trainer.model[0].requires_grad_(False)  # type: ignore[index]
    for x, y in batches[2:4]:
        trainer.step(x, y)
    for layer, weights in zip(first, before, strict=True):
        assert all(map(torch.equal, layer.parameters(), weights))
    trainer.model[0].requires_grad_(True)  # type: ignore[index]
    trainer.step(*batches[4])
    for layer, weights in zip(first, before, strict=True):
        assert not torch.equal(layer.weight, weights[0])
