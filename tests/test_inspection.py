"""What a stage has learnt of its modules, once it is no longer true: seen again, or refused."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat
from helpers import OPTIMIZERS, assert_same_bits, trained, trainer_for, vector_batches
from offbeat.errors import CheckpointError, StageError
from offbeat.methods import DSP, RULES, Rule, StaleWeights, Synchronous

BATCHES = vector_batches(10, dtype=torch.float32)

# ------------------------------------------------------------------ buffers under recompute


class Counts(nn.Module):
    """Writes one buffer from the first batch on and another only from the fourth."""

    calls: Tensor
    late: Tensor

    def __init__(self, how: str, size: int = 2) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.calls > 3 and self.how == "in place":
            self.late.add_(1)
        elif self.calls > 3 and self.how == "uncounted":
            self.late.data.add_(1)
        elif self.calls > 3 and self.how == "anew":
            self.late = self.late + 1
        elif self.how == "from the first":
            self.late.add_(self.calls > 3)
        result: Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("how", ["in place", "uncounted", "anew", "from the first"])
def test_a_buffer_that_begins_to_change_later_counts_once_under_recompute(how: str) -> None:
    torch.manual_seed(0)
    trainer = trained([Counts(how), nn.Linear(6, 4)], BATCHES, DSP())
    state = trainer.state_dict()
    assert state["0.calls"] == 10
    assert state["0.late"].tolist() == [7, 7]


def test_a_large_buffer_that_begins_to_change_later_is_refused_under_recompute() -> None:
    torch.manual_seed(0)
    with pytest.raises(StageError, match=r"'late' of 64 KiB.*late.add_\(0\)"):
        trained([Counts("in place", 20_000), nn.Linear(6, 4)], BATCHES, DSP())
    for stage, method in (
        (Counts("from the first", 20_000), DSP()),
        (Counts("in place", 20_000), StaleWeights(backward="stash")),
    ):
        trainer = trained([stage, nn.Linear(6, 4)], BATCHES, method)
        assert (trainer.state_dict()["0.late"] == 7).all()


# ------------------------------------------------------------------ Python's and NumPy's draws


class Draws(nn.Module):
    """Scales by numbers that Python and NumPy draw, and remembers them by the batch's first value.

    ``draws``: shared with copies of the module, and None as long as nothing is drawn.
    """

    def __init__(self, draws: list[Any], seen: dict[float, list[tuple[float, ...]]]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.say: Any = lambda: (draws, seen)

    def forward(self, x: Tensor) -> Tensor:
        draws, seen = self.say()
        result: Tensor = self.linear(x)
        if not draws:
            return result
        numbers = random.random(), random.gauss(1, 0.1), float(np.random.normal(1, 0.1))
        seen.setdefault(x[0, 0].item(), []).append(numbers)
        return result * sum(numbers)


@pytest.mark.parametrize("rule", RULES)
def test_draws_of_python_and_numpy_are_keyed(rule: Rule) -> None:
    """Those of seed_for, as in a plain loop; the caller's generators stay where they are."""
    torch.manual_seed(0)
    seen: dict[float, list[tuple[float, ...]]] = {}
    stages = [Draws([1], seen), Draws([1], {}), nn.Linear(6, 4)]
    reference = nn.Sequential(*copy.deepcopy(stages))
    optimizer = OPTIMIZERS["momentum"](reference.parameters())
    for n, (x, y) in enumerate(BATCHES):
        hidden = x
        for k, stage in enumerate(reference):
            seed = offbeat.seed_for(5, stage=k, micro_batch=n)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            hidden = stage(hidden)
        optimizer.zero_grad()
        nn.functional.cross_entropy(hidden, y).backward()
        optimizer.step()
    np.random.normal(), random.gauss(0, 1)  # each keeps a second number for next time
    ahead = np.random.get_state(), random.getstate()
    for method in (DSP((0, 0, 0), backward=rule), Synchronous()):
        ours = trained(stages, BATCHES, method, seed=5)
        assert_same_bits(ours.state_dict(), reference.state_dict())
    assert repr((np.random.get_state(), random.getstate())) == repr(ahead)
    seen.clear()
    trained(stages, BATCHES, StaleWeights(backward=rule), seed=5)
    assert len(seen) == 10
    assert all(len(numbers) == 1 + (rule == "recompute") for numbers in seen.values())
    assert all(len({*numbers}) == 1 for numbers in seen.values())


def test_draws_that_begin_later_are_replayed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    draws: list[Any] = []
    seen: dict[float, list[tuple[float, ...]]] = {}
    trainer = trainer_for([Draws(draws, seen), nn.Linear(6, 6), nn.Linear(6, 4)], DSP())
    for n, (x, y) in enumerate(BATCHES):
        draws += [n] * (n == 3)
        trainer.step(x, y)
        if n == 3:
            with pytest.raises(CheckpointError, match="first to draw.*drain=True"):
                trainer.save(tmp_path / "exact")
        elif n == 8:
            trainer.save(tmp_path / "exact")
    trainer.flush()
    replayed = [numbers for numbers in seen.values() if len(numbers) == 2]
    assert len(replayed) == 7
    assert all(one == other for one, other in replayed)


def test_generators_of_python_and_numpy_are_left_to_the_script_where_no_stage_draws() -> None:
    """Another thread, which draws while a stage runs, gets the numbers it would get alone."""
    torch.manual_seed(0)
    drawn: list[Any] = []

    class Meanwhile(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if meanwhile:
                drawn.append((random.random(), np.random.rand()))
            return super().forward(x)

    meanwhile = False
    trainer = trainer_for([Meanwhile(6, 6), nn.Linear(6, 4)], StaleWeights())
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    for n, (x, y) in enumerate(BATCHES[:3]):
        meanwhile = n == 2
        trainer.step(x, y)
    assert drawn == [expected]
