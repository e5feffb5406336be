"""A replica that died comes back and joins the others at a step all agree on."""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store

import jobs
import offbeat
from helpers import OPTIMIZERS, assert_same_bits, vector_batches
from offbeat.averaging import LocalSGD
from offbeat.elastic import membership
from offbeat.elastic.membership import Door
from offbeat.elastic.restarts import returns_of
from offbeat.elastic.survivors import Admission, Survivors
from offbeat.engines.placement import Placement
from offbeat.errors import ConfigurationError, WorkerLost
from offbeat.rng import seed_for
from offbeat.transport.link import Pair
from test_survivors import Network, left_behind, pairs_of

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


def returned(
    stages: int, stumbles: bool, restart: int, row: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """What all processes saw, and the step at which replica 1 joined.

    ``row``: how many processes hold a replica, by default one for each stage.
    """
    row = row or stages
    found = offbeat.launch(
        jobs.come_back, 3 * row, LocalSGD(2), 3, stages, row, stumbles,
        timeout_s=200, go_on=True, restart=restart,
    )  # fmt: skip
    assert left_behind() == []
    back = [words for words in found[0]["said"] if "is back" in words]
    step = int(back[-1].split("joins at step ")[1].split(".")[0])
    for rank, result in enumerate(found):
        words = f"rank {rank}: replica 1 is back and joins at step {step}."
        assert f"{words} Averages go on over replica 0, 1, 2." in result["said"]
        if rank // row == 1:
            assert "do nothing else while trainer.behind is true" in result["refusals"][0]
        first = step if rank // row == 1 else 0
        assert result["steps"] == list(range(first, 12 * jobs.EPOCHS))
        assert math.isfinite(result["evaluation"].loss)
        assert result["evaluation"] == found[0]["evaluation"]
        assert_same_bits(result["state"], found[0]["state"])
    for place in range(row):
        merged = found[row + place]["merged"]
        assert len(merged) > 10
        for replica in (0, 2):
            others = found[replica * row + place]["merged"]
            assert {version: others[version] for version in merged} == merged
    return found, step


def test_a_replica_joins_by_taking_the_average() -> None:
    found, joins = returned(stages=1, stumbles=False, restart=1)
    assert_same_bits(found[0]["state"], by_hand(joins))


@pytest.mark.long
def test_a_replica_of_two_stages_joins_even_if_its_first_return_fails() -> None:
    returned(stages=2, stumbles=True, restart=2)


@pytest.mark.long
@pytest.mark.parametrize(("stages", "row"), [(2, 1), (3, 2)])
def test_a_replica_with_several_stages_in_a_process_joins(stages: int, row: int) -> None:
    returned(stages, stumbles=False, restart=1, row=row)


# ------------------------------------------------------------------------- agreement, simulated

JOINS = 3
"""The round before which the replica is let in."""
NEWCOMER = 1 + 4
"""The second life of replica 1 of 4."""


class Returning(Network):
    """Replica 1 of four has died and comes back before a certain round; others may die anytime."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(4, seed, monkeypatch)
        self.averages += [{} for _ in range(4)]
        self.started += [JOINS] * 4
        self.members: list[int] = []
        self.admitted: set[int] = set()

    def agree(self) -> None:
        """All who are left have noticed the death: the note is written."""
        self.members = sorted(self.alive)
        for member in self.members:
            self.links.setdefault((member, NEWCOMER), [])
        self.newcomer = Survivors(
            0, NEWCOMER, range(4), pairs_of(NEWCOMER, self.members),
            device=torch.device("cpu"),
            deliver=partial(self._delivered, NEWCOMER),
            declare_dead=lambda _: True,
            members=self.members,
        )  # fmt: skip
        self.stages += [self.newcomer] * 4
        self.alive.add(NEWCOMER)

    def admit(self, replica: int) -> None:
        self.admitted.add(replica)
        admission = Admission(NEWCOMER, JOINS, self.members)
        pair = pairs_of(replica, [NEWCOMER])[NEWCOMER]
        self.stages[replica].admit(admission, pair, torch.ones(1))

    def choices(self, rounds: int, ahead: int) -> list[Any]:
        found = self.deliveries()
        if not self.members and all(self.stages[r].has_lost(1) for r in self.alive):
            found.append(self.agree)
        if 1 in self.alive:
            found.append(partial(self.kill, 1))
        for replica in self.alive:
            number, done = self.started[replica], self.averages[replica]
            settled = number != JOINS or JOINS - 1 in done
            if replica == NEWCOMER:
                settled = bool(self.newcomer.gifts())
            elif number == JOINS and replica not in self.admitted:
                if settled and self.members:
                    found.append(partial(self.admit, replica))
                continue
            first = JOINS if replica == NEWCOMER else 0
            before = number - 1 - ahead
            if settled and number < rounds and (before < first or before in done):
                found.append(partial(self.start, replica))
        return found


@pytest.mark.parametrize("deaths", [*(pytest.param(n, marks=pytest.mark.long) for n in (0, 1)), 2])
def test_all_agree_on_every_average_around_a_return(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any order of messages and deaths, the newcomer's too: the same parts, and nobody waits."""
    monkeypatch.setattr(logging.getLogger("offbeat"), "disabled", True)
    for seed in range(300):
        network = Returning(seed, monkeypatch)
        to_die = network.draw.sample([0, 2, 3, NEWCOMER], deaths)
        while choices := network.choices(rounds=7, ahead=seed % 2):
            network.draw.choice(choices)()
            if to_die and to_die[-1] in network.alive and network.draw.random() < 0.03:
                network.kill(to_die.pop())
        left = sorted(network.alive)
        for replica in left:
            averages = network.averages[replica]
            assert list(averages) == list(range(JOINS if replica == NEWCOMER else 0, 7)), seed
            for number, parts in averages.items():
                assert parts == network.averages[left[0]][number], (seed, replica, number)
                there = [r for r in left if r != NEWCOMER or number >= JOINS]
                assert {other + 10.0 * number for other in there} <= set(parts), (seed, number)


# ------------------------------------------------------------------------- promises


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Replica 1 of three is back and connected with 0 and 2; of these 2 has promised nothing."""
    none: Any = None
    monkeypatch.setattr(membership, "_connect", lambda *_, **__: Pair(none, none))
    made = HashStore()
    for name, value in {"who": "1", "here/0": "yes", "stands/2": "yes"}.items():
        returns_of(made).set(f"1/{name}", value)
    return made


@contextmanager
def door(store: Store, rank: int, timeout_s: float, *, done: bool = False) -> Iterator[Door]:
    """Of a replica that is ``done`` with the run, or that has promised not to begin step 1."""
    survivors: Any = SimpleNamespace(has_lost=lambda _: not done, closing=done)
    mailbox: Any = SimpleNamespace(failure=None)
    made = Door(
        store, Placement.across(1, 3, 3, rank), survivors, mailbox, lambda life: life == 1,
        {0: 0, 1: 1, 2: 2}, timeout_s=timeout_s,
    )  # fmt: skip
    made.start()
    deadline = time.monotonic() + 20
    while not done and not returns_of(store).check([f"1/promise/{rank}"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield made
    survivors.closing = True
    made.join()


def test_nobody_waits_for_the_promise_of_one_that_is_done(store: Store) -> None:
    with door(store, 0, timeout_s=60) as waiting, door(store, 2, timeout_s=60, done=True):
        assert waiting.admission(1) is None
    assert json.loads(returns_of(store).get("1/note")) == "void"


def test_a_promise_holds_up_a_step_for_no_longer_than_the_timeout(store: Store) -> None:
    with door(store, 0, timeout_s=0.3) as waiting:
        assert waiting.admission(0) is None
        words = r"not to begin step 1 .* within 0.3 s \(timeout=0.3\)"
        with pytest.raises(WorkerLost, match=words):
            waiting.admission(1)


@pytest.mark.long
def test_a_replica_that_comes_too_late_is_left_out() -> None:
    assert offbeat.launch(jobs.end_early, 2, timeout_s=100, go_on=True, restart=1) == [0, None]
    assert left_behind() == []


def test_returns_need_others_to_join() -> None:
    with pytest.raises(ConfigurationError, match=r"restart=1, go_on=False.*others to join"):
        offbeat.launch(jobs.end_early, 2, restart=1)
