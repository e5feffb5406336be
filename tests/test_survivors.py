"""A replica dies: the others go on, agree on every average and leave nobody behind."""

from __future__ import annotations

import copy
import logging
import os
import random
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jobs
import offbeat
from helpers import OPTIMIZERS, assert_same_bits, mlp, trainer_for, vector_batches
from offbeat.averaging import AllReduce, Averaging, DaSGD, EagerDiLoCo, LocalSGD
from offbeat.elastic import survivors
from offbeat.elastic.survivors import Survivors
from offbeat.errors import ConfigurationError
from offbeat.rng import seed_for
from offbeat.transport.base import Gathered, Key
from offbeat.transport.link import Pair
from offbeat.transport.wire import Arrival, pack

pytestmark = pytest.mark.timeout(300)  # many processes, perhaps on a busy machine


def left_behind() -> list[str]:
    """Children of this process that still run."""
    command = ["ps", "-o", "args=", "--ppid", str(os.getpid())]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in listing.splitlines() if "offbeat.engines.child" in line]


def survivors_of(
    averaging: Averaging,
    replicas: int,
    stages: int,
    dies: int,
    at: int,
    delay_s: float | None,
    row: int | None = None,
) -> list[dict[str, Any]]:
    """``row``: how many processes hold a replica, by default one for each stage."""
    row = row or stages
    found = offbeat.launch(
        jobs.outlive, replicas * row, averaging, replicas, stages, dies, at, delay_s,
        timeout_s=200, go_on=True,
    )  # fmt: skip
    assert left_behind() == []
    lost = range(dies // row * row, dies // row * row + row)
    assert all((found[rank] is None) == (rank in lost) for rank in range(len(found)))
    return [result for result in found if result is not None]


def simulated(dies: int, at: int) -> dict[str, Any]:
    """Three replicas under LocalSGD(every=2) by hand, one of which takes part in ``at`` steps."""
    models = [jobs.dropout_net() for _ in range(3)]
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in models]
    left = [0, 1, 2]

    def average() -> None:
        with torch.no_grad():
            for same in zip(*(models[r].parameters() for r in left), strict=True):
                total: Tensor = same[0].detach().clone()
                for other in same[1:]:
                    total += other
                for parameter in same:
                    parameter.copy_(total / len(left))

    for number, (x, y) in enumerate(vector_batches(12, rows=12, dtype=torch.float32)):
        if number == at:
            left.remove(dies)
        for r in left:
            torch.manual_seed(seed_for(3, replica=r, stage=0, micro_batch=number))
            optimizers[r].zero_grad()
            nn.functional.cross_entropy(models[r](x.chunk(3)[r]), y.chunk(3)[r]).backward()
            optimizers[r].step()
        if number % 2 == 1:
            average()
    return copy.deepcopy(models[left[0]].state_dict())


@pytest.mark.parametrize(("dies", "at"), [(2, 5), pytest.param(0, 4, marks=pytest.mark.long)])
def test_averages_go_on_over_who_is_left(dies: int, at: int) -> None:
    expected = simulated(dies, at)
    found = survivors_of(LocalSGD(2), 3, 1, dies, at, None)
    left = [replica for replica in range(3) if replica != dies]
    for result in found:
        assert_same_bits(result["state"], expected)
        (words,) = result["said"]
        assert f": replica {dies} is gone (" in words
        assert f"Averages go on over who is left: replica {left[0]}, {left[1]}." in words


@pytest.mark.long
def test_a_replica_of_two_stages_goes_as_a_whole() -> None:
    found = survivors_of(DaSGD(2, 1), 2, 2, dies=3, at=5, delay_s=None)
    assert_same_bits(found[0]["state"], found[1]["state"])
    assert found[0]["evaluation"] == found[1]["evaluation"]
    assert all("replica 1 is gone" in result["said"][0] for result in found)


@pytest.mark.parametrize(
    ("stages", "row", "dies"), [(2, 1, 1), pytest.param(3, 2, 2, marks=pytest.mark.long)]
)
def test_a_replica_goes_with_all_stages_of_a_process(stages: int, row: int, dies: int) -> None:
    found = survivors_of(DaSGD(2, 1), 2, stages, dies, at=5, delay_s=None, row=row)
    for result in found:
        assert_same_bits(result["state"], found[0]["state"])
        assert "replica 1 is gone" in result["said"][0]


def test_one_process_of_several_replicas_takes_them_along() -> None:
    words = r"with 4 replicas in 2 processes: one that dies would take 2 of them with it.*Start 4"
    with pytest.raises(ConfigurationError, match=words):
        offbeat.launch(jobs.outlive, 2, DaSGD(2, 1), 4, 1, 1, 5, None, timeout_s=60)


@pytest.mark.parametrize("dies", [0, pytest.param(2, marks=pytest.mark.long)])
def test_those_who_are_left_can_save(dies: int, tmp_path: Path) -> None:
    found = offbeat.launch(jobs.save_without, 3, dies, str(tmp_path), timeout_s=200, go_on=True)
    assert found[dies] is None
    for result in (result for rank, result in enumerate(found) if rank != dies):
        assert result["saved_s"] < 20  # and not after timeout=300
        assert result["losses"] == 12
    left = next(result for result in found if result is not None)
    assert [path.name for path in (tmp_path / "exact").glob("step-*")] == ["step-000008"]
    again = trainer_for(jobs.dropout_net(), optimizer=OPTIMIZERS["momentum"], seed=3)
    resumed = again.resume(tmp_path / "drained")
    assert (resumed.step, resumed.kind) == (8, "drained")
    assert_same_bits(again.state_dict(), left["saved"])


@pytest.mark.long
def test_a_death_at_any_moment_of_a_save_leaves_others_that_agree(tmp_path: Path) -> None:
    draw = random.Random(5)
    for moment in range(6):
        dies, at, folder = moment % 3, draw.randrange(3, 12), tmp_path / str(moment)
        todo = (dies, at, draw.uniform(0, 0.05), str(folder))
        found = offbeat.launch(jobs.save_often, 3, *todo, timeout_s=100, go_on=True)
        one, other = (result for result in found if result is not None)
        assert one["refusals"] == other["refusals"], todo
        assert max(one["slowest_s"], other["slowest_s"]) < 30, todo  # and not timeout=60
        again = trainer_for(jobs.dropout_net(), optimizer=OPTIMIZERS["momentum"], seed=3)
        assert again.resume(folder).step == 40
        assert_same_bits(again.state_dict(), one["state"])
        assert_same_bits(one["state"], other["state"])


@pytest.mark.long
def test_an_error_in_one_replica_ends_that_one_alone() -> None:
    found = survivors_of(LocalSGD(2), 2, 2, dies=2, at=5, delay_s=-1)
    assert_same_bits(found[0]["state"], found[1]["state"])


# ------------------------------------------------------------------------- agreement, simulated


def pairs_of(replica: int, everyone: Iterable[int]) -> dict[int, Any]:
    """In place of links the names of both ends."""
    return {other: Pair((replica, other), (other, replica)) for other in everyone}  # type: ignore[arg-type]


class Network:
    """Replicas of one stage over links that deliver in order, one message at a time, or die."""

    def __init__(self, replicas: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw = random.Random(seed)
        self.links: dict[tuple[int, int], list[Any]] = {}
        self.arrived: dict[tuple[int, int], Any] = {}
        self.lost: dict[tuple[int, int], Any] = {}
        self.alive = set(range(replicas))
        self.averages: list[dict[int, list[float]]] = [{} for _ in range(replicas)]
        self.started = [0] * replicas
        monkeypatch.setattr(survivors, "Connection", self._connection)
        self.stages = [
            Survivors(
                0, replica, range(replicas), pairs_of(replica, range(replicas)),
                device=torch.device("cpu"),
                deliver=partial(self._delivered, replica),
                declare_dead=lambda _: True,
            )
            for replica in range(replicas)
        ]  # fmt: skip

    def _connection(self, pair: Any, _name: str, arrived: Any, lost: Any) -> Any:
        sent = self.links.setdefault(pair.outgoing, [])
        self.arrived[pair.incoming], self.lost[pair.incoming] = arrived, lost

        def put(key: Key, message: Any) -> None:
            sent.append(pack(key, message))

        return SimpleNamespace(put=put, start=lambda: None)

    def _delivered(self, replica: int, key: Key, gathered: Gathered) -> None:
        self.averages[replica][key.batch] = [float(parts[0]) for parts in gathered.parts]

    def start(self, replica: int) -> None:
        number = self.started[replica]
        self.started[replica] += 1
        part = torch.full((40,), replica + 10.0 * number)[:1]
        self.stages[replica].gather(Key("weights", 0, number), [part])

    def carry(self, link: tuple[int, int]) -> None:
        arrival = Arrival(self.links[link].pop(0).header)
        self.arrived[link](arrival)

    def kill(self, replica: int) -> None:
        """Any number of its last messages never arrive."""
        self.alive.discard(replica)
        for (sender, _), sent in self.links.items():
            if sender == replica:
                del sent[self.draw.randint(0, len(sent)) :]
                sent.append(None)

    def choices(self, rounds: int, ahead: int) -> list[Any]:
        found = self.deliveries()
        for replica in self.alive:
            waits_for = self.started[replica] - 1 - ahead
            if self.started[replica] < rounds and (
                waits_for < 0 or waits_for in self.averages[replica]
            ):
                found.append(partial(self.start, replica))
        return found

    def deliveries(self) -> list[Any]:
        found: list[Any] = []
        for link, sent in self.links.items():
            if sent and link[1] in self.alive and link in self.lost:
                broken = partial(self.lost[link], OSError("closed"))
                found.append(partial(self.carry, link) if sent[0] else lambda s=sent, b=broken: (
                    s.pop(0), b()
                ))  # fmt: skip
        return found


@pytest.mark.parametrize(
    "deaths", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 1)), 2, 3]
)
def test_all_who_are_left_agree_whatever_had_arrived(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any order of messages and deaths: the same parts in every average, and nobody waits."""
    logging.getLogger("offbeat").disabled = True
    for seed in range(300):
        network = Network(4, seed, monkeypatch)
        to_die = network.draw.sample(range(4), deaths)
        while choices := network.choices(rounds=6, ahead=seed % 2):
            network.draw.choice(choices)()
            if to_die and network.draw.random() < 0.03:
                network.kill(to_die.pop())
        left = sorted(network.alive)
        for replica in left:
            assert list(network.averages[replica]) == list(range(6)), (seed, replica)
            assert network.averages[replica] == network.averages[left[0]], (seed, replica)
            for number, parts in network.averages[replica].items():
                assert {other + 10.0 * number for other in left} <= set(parts), (seed, number)
    logging.getLogger("offbeat").disabled = False


@pytest.mark.long
def test_kills_at_any_moment_leave_survivors_that_agree() -> None:
    draw = random.Random(7)
    averagings: list[Averaging] = [AllReduce(), DaSGD(2, 1), LocalSGD(1, compress="int8")]
    for averaging in averagings:
        dies, at = draw.randrange(3), draw.randrange(1, 11)
        found = survivors_of(averaging, 3, 1, dies, at, draw.uniform(0, 0.01))
        assert len(found) == 2
        assert_same_bits(found[0]["state"], found[1]["state"])


@pytest.mark.long
def test_without_losses_nothing_changes() -> None:
    """The edges between pairs give the bits of the collective, and of one process."""
    found = offbeat.launch(jobs.outlive, 2, DaSGD(3, 1), 2, 1, -1, 0, None, timeout_s=200)
    network, batches = jobs.dropout_net(), vector_batches(12, rows=12, dtype=torch.float32)
    trainer = trainer_for(network, replicas=2, averaging=DaSGD(3, 1), seed=3)
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    for result in found:
        assert_same_bits(result["state"], trainer.state_dict())
        assert result["said"] == []


@pytest.mark.long
def test_all_must_have_been_told_the_same() -> None:
    words = r"when_replica_dies differs between processes: go on on rank 0, stop on rank 1"
    with pytest.raises(ConfigurationError, match=words):
        offbeat.launch(jobs.disagree_about_death, 2, timeout_s=60)


@pytest.mark.long
def test_when_all_fail_the_first_error_is_raised() -> None:
    with pytest.raises(ValueError, match="a planned mistake"):
        offbeat.launch(jobs.raise_on, 1, 0, go_on=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"when_replica_dies": "panic"}, r"unknown when_replica_dies 'panic'.*stop, go on"),
        ({"when_replica_dies": "go on"}, r"with one replica leaves nobody"),
        (
            {"when_replica_dies": "go on", "replicas": 2, "averaging": EagerDiLoCo(2)},
            r"made for a fixed number of replicas",
        ),
        (
            {"when_replica_dies": "go on", "replicas": 2, "averaging": LocalSGD(2, exact=False)},
            r"Take exact=True",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trainer_for(mlp(), **settings)
