"""The library broken on purpose: every check that guards it must turn red.

Each test first passes on the healthy library, then breaks one thing and expects the same check to
fail. A mutation that nobody notices means an oracle that proves nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import oracles
from helpers import OPTIMIZERS, assert_same_bits, cnn, image_batches, plain_loop, trained
from offbeat.errors import OffbeatError
from offbeat.methods import ADL, DSP, FDG, PipeDream2BW, Synchronous
from offbeat.methods.base import Method
from offbeat.schedules.schedule import Schedule
from offbeat.stages import buffers, network, stage, versions
from offbeat.stages.fill import Fill
from test_oracles import CASES, Case, compare

SGD = OPTIMIZERS["sgd"]
STAGES = 3


def check(case: Case) -> None:
    compare(
        case.method(STAGES), case.oracle, STAGES, seed=1, optimizer=SGD, **case.settings(STAGES)
    )


def seen_red(case: Case) -> None:
    # A RuntimeError is autograd's own, when an update spoils a graph it still needs.
    with pytest.raises((AssertionError, OffbeatError, RuntimeError)):
        check(case)


# ------------------------------------------------------------------ schedules


def one_step_late(schedule: Schedule) -> Schedule:
    """Stage 0 keeps one step more in flight than the paper says."""
    late = tuple(
        slot
        if slot.kind == "F"
        else slot._replace(offset=slot.offset - (1 if slot.kind == "U" else schedule.micro_batches))
        for slot in schedule.cycles[0]
    )
    return replace(schedule, cycles=(late, *schedule.cycles[1:]))


def update_too_early(schedule: Schedule) -> Schedule:
    """The last stage updates before the last backward of the step."""
    cycle = list(schedule.cycles[-1])
    place = next(i for i, slot in enumerate(cycle) if slot.kind == "U")
    cycle[place - 1], cycle[place] = cycle[place], cycle[place - 1]
    return replace(schedule, cycles=(*schedule.cycles[:-1], tuple(cycle)))


@pytest.mark.parametrize("mutation", [one_step_late, update_too_early])
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_schedule_is_seen(name: str, mutation: Any, monkeypatch: Any) -> None:
    case = CASES[name]
    check(case)
    kind = type(case.method(STAGES))
    right = kind.schedule
    monkeypatch.setattr(kind, "schedule", lambda self, stages: mutation(right(self, stages)))
    seen_red(case)


def test_reading_the_newest_weights_instead_of_the_buffered_is_seen(monkeypatch: Any) -> None:
    right = PipeDream2BW.schedule

    def newest(self: PipeDream2BW, stages: int) -> Schedule:
        schedule = right(self, stages)
        cycles = tuple(tuple(s._replace(version=None) for s in c) for c in schedule.cycles)
        return replace(schedule, cycles=cycles)

    monkeypatch.setattr(PipeDream2BW, "schedule", newest)
    seen_red(CASES["pipedream-2bw"])


# ------------------------------------------------------------------ backward rules

BY_RULE = {
    "stash": [name for name, case in CASES.items() if case.oracle is oracles.stash],
    "current": [name for name, case in CASES.items() if case.oracle is oracles.current],
    "recompute": [name for name, case in CASES.items() if case.oracle is oracles.recompute],
}


@pytest.mark.parametrize(
    ("declared", "done"),
    [(one, other) for one in BY_RULE for other in BY_RULE if one != other],
)
def test_a_rule_that_does_another_rule_s_work_is_seen(
    declared: str, done: Any, monkeypatch: Any
) -> None:
    right = stage.Stage.begin

    def wrong(self: stage.Stage, fill: Fill) -> None:
        right(self, replace(fill, rule=done) if fill.rule == declared else fill)

    for name in BY_RULE[declared]:
        check(CASES[name])
    monkeypatch.setattr(stage.Stage, "begin", wrong)
    for name in BY_RULE[declared]:
        seen_red(CASES[name])


def test_a_stash_that_is_overwritten_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(stage, "move_to_fresh_storage", lambda parameters: [])
    seen_red(CASES["pipedream"])


def test_a_current_rule_that_keeps_an_alias_is_seen(monkeypatch: Any) -> None:
    """What autocast or a copy would do: the rebuilt weight is not the newest."""
    right = versions.SavedWeight.__init__

    def aliasing(self: Any, parameter: Any, source: Any, seen: Any) -> None:
        right(self, parameter, source.detach().clone(), seen)

    monkeypatch.setattr(versions.SavedWeight, "__init__", aliasing)
    seen_red(CASES["stale-weights"])


# ------------------------------------------------------------------ gradients


def test_forgetting_to_shrink_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(FDG, "shrink", 1.0)
    seen_red(CASES["fdg-shrinking"])


def test_forgetting_the_share_of_a_micro_batch_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(Method, "sums_gradients", True)
    for name in ("gpipe", "1f1b", "pipedream-accumulated", "stale-weights-accumulated"):
        seen_red(CASES[name])


def test_averaging_where_a_sum_was_asked_for_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(ADL, "sums_gradients", False)
    seen_red(CASES["adl-sum"])


def test_a_drain_that_loses_a_batch_is_seen(monkeypatch: Any) -> None:
    right = Schedule.drain
    monkeypatch.setattr(Schedule, "drain", lambda self, k, steps: right(self, k, steps)[:-2])
    seen_red(CASES["pipedream"])


# ------------------------------------------------------------------ exactness checks


def zero_lag_check(**settings: Any) -> None:
    batches = image_batches(4)
    expected, _ = plain_loop(cnn(), batches, clip=settings.get("clip"))
    ours = trained(cnn(), batches, Synchronous(), cuts=[3, 5], **settings)
    assert_same_bits(ours.state_dict(), expected.state_dict())


def test_clipping_per_stage_in_synchronous_training_is_seen(monkeypatch: Any) -> None:
    zero_lag_check(clip=0.3)
    monkeypatch.setattr(Schedule, "synchronous", False)
    with pytest.raises(AssertionError):
        zero_lag_check(clip=0.3)


def test_statistics_that_move_twice_are_seen(monkeypatch: Any) -> None:
    def counted() -> int:
        ours = trained(cnn(), image_batches(7), DSP(), cuts=[3, 5])
        return int(ours.state_dict()["1.num_batches_tracked"])

    assert counted() == 7
    monkeypatch.setattr(buffers.WrittenBuffers, "restored", lambda self: nullcontext())
    assert counted() == 15  # each twice, and the first once more for whoever keeps features


def test_random_masks_that_are_not_replayed_are_seen(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    dropout = torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 4)
    )
    batches = [(torch.randn(6, 6), torch.randint(4, (6,))) for _ in range(6)]

    def run(method: Method) -> dict[str, Any]:
        return trained(dropout, batches, method, SGD, cuts=[2], seed=1).state_dict()

    first = run(DSP())
    assert_same_bits(run(DSP()), first)
    monkeypatch.setattr(network, "keyed", lambda *_, **__: nullcontext())
    with pytest.raises(AssertionError):
        assert_same_bits(run(DSP()), first)
