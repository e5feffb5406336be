"""Dropout beside other threads: each draws what it would draw alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rich.live import Live
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offbeat
from helpers import assert_same_bits, trainer_for
from offbeat.errors import StageError
from offbeat.methods import DSP, StaleWeights
from offbeat.rng import Apart, others


class Augmentation:
    """A thread that draws all the time, as a prefetcher does."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.drawn: list[Any] = []
        self._draw = draw
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetcher")

    def _run(self) -> None:
        while not self._stop.wait(0.0002):
            self.drawn.append(self._draw())

    def wait(self) -> None:
        """Until it has drawn once more."""
        count, deadline = len(self.drawn), time.monotonic() + 20
        while len(self.drawn) == count and time.monotonic() < deadline:
            time.sleep(0.0005)

    def __enter__(self) -> Augmentation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Host(nn.Module):
    """Draws as augmentations inside a model do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random() / 10 + float(np.random.rand()) / 10)


class Replayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def net(*middle: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.RReLU(),
        *(kind() for kind in middle), nn.Linear(16, 16), nn.AlphaDropout(0.2), nn.Linear(16, 4),
    )  # fmt: skip


def train(
    model: nn.Sequential, method: Any, steps: int = 12, wait: Callable[[], None] = lambda: None
) -> Any:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    trainer = trainer_for(model, method, cuts=[3], seed=1)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator)
        trainer.step(x, torch.randint(4, (8,), generator=generator))
        wait()
    trainer.flush()
    return trainer.state_dict()


@pytest.mark.parametrize("method", [StaleWeights(), DSP()], ids=str)
def test_a_thread_that_draws_changes_no_mask_and_gets_no_number_twice(method: Any) -> None:
    alone = train(net(), method)
    model = net()
    with Augmentation(lambda: torch.rand(2)) as thread:
        beside = train(model, method, wait=thread.wait)
    assert len(thread.drawn) >= 12
    assert_same_bits(beside, alone)
    numbers = {tuple(pair.tolist()) for pair in thread.drawn}
    assert len(numbers) >= len(thread.drawn) - 3  # train() seeds anew once


def test_the_other_thread_draws_as_if_it_were_alone() -> None:
    batches = [(torch.randn(8, 6), torch.zeros(8).long()) for _ in range(8)]
    trainer = trainer_for(net(), StaleWeights(), cuts=[3], seed=1)
    trainer.step(*batches[0])
    torch.manual_seed(9)
    with Augmentation(lambda: torch.rand(2)) as thread:
        for batch in batches:
            trainer.step(*batch)
            thread.wait()
    torch.manual_seed(9)
    assert len(thread.drawn) > 3
    assert all(torch.equal(found, torch.rand(2)) for found in thread.drawn)


@pytest.mark.parametrize(
    ("inside", "draw"),
    [
        (Replayed, lambda: torch.rand(3)),
        (Host, lambda: random.random()),
        (Host, lambda: np.random.rand(3)),
    ],
    ids=["checkpointed", "python", "numpy"],
)
def test_what_has_to_be_lent_is_watched(inside: Any, draw: Any) -> None:
    """A thread that draws from it is noticed; one that does not changes nothing."""
    alone = train(net(inside), StaleWeights())
    with Augmentation(lambda: None) as thread:
        assert_same_bits(train(net(inside), StaleWeights(), wait=thread.wait), alone)
    words = "moved the process's generators .* otherwise than before, and thread 'prefetcher' lives"
    with Augmentation(draw), pytest.raises(StageError, match=words):
        train(net(inside, Pause), StaleWeights(), steps=400)


class Pause(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x


def test_nobody_is_beside_the_stages_of_a_launched_process() -> None:
    assert offbeat.launch(names_of_others, 2) == [[], []]


def names_of_others() -> list[str]:
    trainer = trainer_for(net(), StaleWeights(), cuts=[3], seed=1)
    trainer.step(torch.ones(4, 6), torch.zeros(4).long())
    return others()


def test_threads_that_never_draw_cost_nothing() -> None:
    end = threading.Event()
    for name in ("offbeat-board", "QueueFeederThread", "Thread-3 (_pin_memory_loop)"):
        threading.Thread(target=end.wait, name=name, daemon=True).start()
    with Live("a bar that is drawn anew"):
        assert others() == []
    end.set()


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(5),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(9, (5,)),
    "randint low": lambda: torch.randint(2, 9, (5,)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 2, 9),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(torch.full((5,), 0.5)),
    "normal": lambda: torch.normal(torch.zeros(5), torch.ones(5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "uniform_": lambda: torch.empty(5).uniform_(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "dropout": lambda: nn.functional.dropout(torch.ones(9), 0.5),
    "native_dropout": lambda: torch.native_dropout(torch.ones(9), 0.5, True)[0],
    "rrelu": lambda: nn.functional.rrelu(-torch.ones(9), training=True),
    "gumbel": lambda: nn.functional.gumbel_softmax(torch.ones(9)),
    "poisson": lambda: torch.poisson(torch.ones(9)),
    "gamma": lambda: torch._standard_gamma(torch.ones(9)),
    "own": lambda: torch.rand(5, generator=torch.Generator().manual_seed(3)),
    "process's": lambda: torch.rand(5, generator=torch.default_generator),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_draws_the_bits_that_it_draws_from_the_process_generator(name: str) -> None:
    draw = OPERATIONS[name]
    torch.manual_seed(4)
    expected = [draw(), draw()]
    torch.manual_seed(11)
    before = torch.default_generator.get_state()
    with Apart([torch.Generator().manual_seed(4)]):
        found = [draw(), draw()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.default_generator.get_state(), before)
