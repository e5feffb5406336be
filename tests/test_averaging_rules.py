"""What a plan and an outer rule may say: who averages with whom, and what is remembered."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from averaging_oracles import Gradient
from helpers import OPTIMIZERS
from offbeat.averaging import DaSGD, LocalSGD
from offbeat.averaging.base import Periodic, Plan
from offbeat.averaging.outer import Outer
from offbeat.errors import ConfigurationError
from offbeat.transport.base import Gathered, Key
from offbeat.transport.memory import Memory
from test_averaging import (
    REPLICAS,
    Case,
    assert_resumes,
    batches_for,
    check,
    course_of,
    moments,
    rows_now,
    run,
    trainer_with,
)

# ------------------------------------------------------------------ who averages with whom


@dataclass(frozen=True)
class Ring(Periodic):
    """D-PSGD on a ring: each averages with both neighbours (Lian et al. 2017, arXiv 1705.09056)."""

    name = "ring"
    title = "Ring"
    reference = "Lian et al. 2017, arXiv 1705.09056"

    def plan(self) -> Plan:
        return Plan(every=self.every, partners=self._neighbours)

    def _neighbours(self, round: int, replica: int, replicas: int) -> set[int]:
        return {(replica + step) % replicas for step in (-1, 0, 1)}


class Pairs(Ring):
    """Always the same two, and never the others."""

    def _neighbours(self, round: int, replica: int, replicas: int) -> set[int]:
        return {replica, replica ^ 1}


def in_a_ring(starts: list[Tensor], gradient: Gradient, steps: int, *, lr: float, tau: int) -> Any:
    """X <- X - lr G in every step, X <- X W in every tau-th, W = 1/3 on three diagonals."""
    m = len(starts)
    mixing = sum(torch.eye(m, dtype=torch.float64).roll(step, 0) for step in (-1, 0, 1)) / 3
    x = torch.stack(starts, dim=1)
    history = [list(x.unbind(dim=1))]
    for k in range(1, steps + 1):
        x = x - lr * torch.stack([gradient(i, k, x[:, i]) for i in range(m)], dim=1)
        x = x @ mixing if k % tau == 0 else x
        history.append(list(x.unbind(dim=1)))
    return history


def test_a_replica_averages_with_its_partners_only() -> None:
    check(Case(Ring(3), in_a_ring, {"tau": 3}), replicas=5)
    with pytest.raises(AssertionError):
        check(Case(LocalSGD(3), in_a_ring, {"tau": 3}), replicas=5)


def test_moments_are_averaged_among_partners() -> None:
    averaging = Pairs(every=1, optimizer_state="average")
    trainer = trainer_with(averaging, replicas=4, optimizer=OPTIMIZERS["momentum"])
    for x, y in batches_for(4, 3):
        trainer.step(x, y)
    for found in (rows_now(trainer), [moments(trainer, r, "momentum_buffer")[0] for r in range(4)]):
        assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
        assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize(("compress", "tolerance"), [("bf16", 1e-3), ("int8", 2e-2)])
def test_partners_measure_from_a_point_that_all_know(compress: Any, tolerance: float) -> None:
    """Not from the last average, which differs from one group to the next."""
    case = Case(Ring(2), in_a_ring, {"tau": 2})
    plain = course_of(case, replicas=5)
    near = course_of(replace(case, averaging=Ring(2, compress=compress)), replicas=5)
    gap = max(float((a - b).abs().max()) for a, b in zip(plain[-1], near[-1], strict=True))
    assert 0 < gap < tolerance


def test_the_partners_of_a_lost_replica_average_without_it(monkeypatch: Any) -> None:
    send = Memory.send

    def without_1(self: Memory, key: Key, message: Any) -> None:
        if isinstance(message, Gathered) and key.what == "weights":
            left = (0, 2, 3)
            parts = [message.parts[replica] for replica in left]
            message = Gathered(parts, 0.0, 0.0, len(left), left)
        send(self, key, message)

    monkeypatch.setattr(Memory, "send", without_1)
    trainers = [trainer_with(averaging, replicas=4) for averaging in (Pairs(1), LocalSGD(9))]
    for trainer in trainers:
        trainer.step(*batches_for(4, 1)[0])
    pairs, alone = map(rows_now, trainers)
    assert torch.equal(pairs[0], alone[0])
    assert torch.equal(pairs[2], (alone[2] + alone[3]) / 2)
    assert torch.equal(pairs[3], pairs[2])


@pytest.mark.parametrize("members", [{1, 2}, {0, 3}, {0, -1}])
def test_partners_that_make_no_sense_are_refused(members: set[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(Ring, "_neighbours", lambda *_: members)
    words = r"partners\(0, 0, 3\) gives .*itself and with any others from 0 to 2"
    with pytest.raises(ConfigurationError, match=words):
        trainer_with(Ring(1)).step(*batches_for(3, 1)[0])


def test_partners_need_exact_averages() -> None:
    with pytest.raises(ConfigurationError, match=r"exact=False sends one sum .* Use exact=True"):
        trainer_with(Ring(2, exact=False))


# ------------------------------------------------------------------ what rules remember


class Trailing(Outer):
    """X is the mean of the last three averages, which it keeps in a list."""

    remembers: ClassVar[tuple[str, ...]] = ("_means",)

    def __init__(self, *_: object) -> None:
        self._means: Any = []

    def target(self, mean: Tensor | None, now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        self._means.append(mean)
        del self._means[:-3]
        return torch.stack(list(self._means)).mean(0)


class Forgetful(Trailing):
    remembers = ()


class Queueing(Trailing):
    def __init__(self, *_: object) -> None:
        self._means = deque()


class Counted(Trailing):
    _count = 0

    def target(self, mean: Tensor | None, now: Tensor) -> Tensor | None:
        self._count += 1
        return super().target(mean, now)


@dataclass(frozen=True)
class LastThree(Periodic):
    name = "last-three"
    title = "Mean of three"
    reference = "none"

    outer: type[Outer] = Trailing

    def plan(self) -> Plan:
        return Plan(every=self.every, outer=self.outer)


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (
            Forgetful,
            r"Forgetful._means is a list, which may change, .* Add '_means' to `remembers`",
        ),
        (Queueing, r"Queueing._means remembers a deque, which no checkpoint can hold"),
        (Counted, r"Counted._count changes from 1 to 2, .* Add '_count' to `remembers`"),
    ],
)
def test_what_a_checkpoint_would_lose_is_refused(outer: type[Outer], words: str) -> None:
    trainer = trainer_with(LastThree(1, outer))
    with pytest.raises(ConfigurationError, match=words):
        for x, y in batches_for(REPLICAS, 3):
            trainer.step(x, y)


def test_a_rule_that_remembers_in_a_list_resumes_with_the_same_bits(tmp_path: Path) -> None:
    assert_resumes(LastThree(3), tmp_path)


def test_a_snapshot_for_another_replica_has_no_debts() -> None:
    (first, *_) = run(DaSGD(2, 1, warmup=2, compress="int8"))._engine.workers
    assert first.averager is not None
    for debts in (True, False):
        state = first.averager.snapshot(debts=debts)
        owed = [state["gradient_codec"], *(each["codec"] for each in state["fragments"])]
        assert [list(memory) for memory in owed] == [["_debt"] if debts else []] * 2
