"""The streams engine: what can be said about it without a GPU.

A pretended lane records by running a function and undoing it, and replays by running it again. So
slots, stashed copies, gradients' places, updates and messages are the engine's own; only CUDA is
not. ``benchmarks/one_gpu/bits.py`` makes the same comparison on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from helpers import (
    OPTIMIZERS,
    assert_same_bits,
    cnn,
    image_batches,
    trained,
)
from offbeat import checks, nest, streams
from offbeat import trainer as trainer_module
from offbeat.graphs import GraphStage
from offbeat.methods import ADL, DSP, METHODS, PipeDream, StaleWeights
from offbeat.rng import seeded
from offbeat.transport.memory import Memory

CPU = torch.device("cpu")


class PretendedLane:
    """Runs everything at once, in the order in which it is queued."""

    def __init__(self, device: torch.device) -> None:
        del device
        self.stage: GraphStage | None = None
        self.recorded = 0
        self.replayed = 0
        self._seed = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def now(self) -> PretendedInstant:
        return PretendedInstant(perf_counter())

    def wait(self, instant: object) -> None: ...

    def wait_for_caller(self) -> None: ...

    def caller_waits(self) -> None: ...

    def seed(self, seed: int) -> None:
        self._seed = seed

    def drew(self) -> bool:
        return True

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def record(self, function: Callable[[], Any], pool: object = None) -> tuple[Any, Any]:
        del pool
        assert self.stage is not None
        before = [(t, t.detach().clone()) for t in self._state(self.stage)]
        with seeded(0, CPU):
            result = function()
        for tensor, values in before:
            tensor.data.copy_(values)
        self.recorded += 1
        return PretendedRecording(self, function, result), result

    @staticmethod
    def _state(stage: GraphStage) -> list[Tensor]:
        """Everything a recorded operation writes, which recording must leave as it was."""
        found: list[Tensor] = []
        for module in stage.modules:
            found += [*module.parameters(), *module.buffers()]
        for optimizer in stage.optimizers:
            found += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        for places in (stage._fresh, stage._sums):
            found += [place for place in places or () if place is not None]
        return found


class PretendedInstant(float):
    @property
    def event(self) -> PretendedInstant:
        return self

    def synchronize(self) -> None: ...

    def seconds_after(self, earlier: float) -> float:
        return self - earlier

    def __sub__(self, other: float) -> PretendedInstant:
        return PretendedInstant(float(self) - other)


class PretendedRecording:
    def __init__(self, lane: PretendedLane, function: Callable[[], Any], result: Any) -> None:
        self._lane = lane
        self._function = function
        self._places = nest.tensors(result)

    def replay(self) -> None:
        with seeded(self._lane._seed, CPU), torch.enable_grad():
            result = self._function()
        for place, value in zip(self._places, nest.tensors(result), strict=True):
            place.data.copy_(value.detach())
        self._lane.replayed += 1


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "Lane", PretendedLane)
    monkeypatch.setattr(streams, "LaneMemory", Memory)
    monkeypatch.setattr(trainer_module, "marked", lambda: PretendedInstant(perf_counter()))
    monkeypatch.setattr(checks, "check_streams", lambda *_: None)
    made = GraphStage.__init__

    def init(self: GraphStage, *arguments: Any, **settings: Any) -> None:
        made(self, *arguments, **settings)
        for lane in self._lanes:
            lane.stage = self  # type: ignore[attr-defined]

    monkeypatch.setattr(GraphStage, "__init__", init)


def stages_of(trainer: offbeat.Trainer) -> list[GraphStage]:
    found = [worker.stage for worker in trainer._workers]
    assert all(isinstance(stage, GraphStage) for stage in found)
    return found  # type: ignore[return-value]


def replays(stage: GraphStage) -> int:
    return sum(lane.replayed for lane in stage._lanes)  # type: ignore[attr-defined]


def compare(model: nn.Sequential, batches: Any, method: Any, **settings: Any) -> offbeat.Trainer:
    """Trains with both engines, compares everything and returns the one with streams."""
    serial = trained(model, batches, method, **settings)
    ours = trained(model, batches, method, engine="streams", **settings)
    assert_same_bits(ours.state_dict(), serial.state_dict())
    for stage in range(serial.stages):
        assert ours.ledger.lags(stage) == serial.ledger.lags(stage)
    assert ours.ledger.losses(serial.stages - 1) == serial.ledger.losses(serial.stages - 1)
    return ours


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_method_gives_the_serial_bits(method: Any) -> None:
    trainer = compare(cnn(), image_batches(24, rows=8), method(), cuts=[3, 6])
    if method.name != "pipedream-2bw":
        assert all(replays(stage) > 20 for stage in stages_of(trainer))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    "method",
    [
        StaleWeights(),
        StaleWeights(backward="stash", accumulate=2),
        PipeDream(backward="current"),
        PipeDream(accumulate=4),
        ADL(accumulate=3),
        DSP(),
    ],
    ids=str,
)
def test_rules_and_accumulation(method: Any, optimizer: str) -> None:
    compare(
        cnn(), image_batches(20, rows=12, last_rows=7), method,
        optimizer=OPTIMIZERS[optimizer], cuts=[3, 6], clip=0.5,
    )  # fmt: skip
