"""Schedules as values: printed, parsed, checked, read. No torch anywhere in here."""

from __future__ import annotations

from pathlib import Path

import pytest

import oracles
from offbeat.errors import Deadlock, ScheduleError
from offbeat.methods import (
    ADL,
    DSP,
    METHODS,
    Asynchronous,
    GPipe,
    Method,
    OneFOneB,
    StaleWeights,
)
from offbeat.schedules.schedule import Schedule
from offbeat.schedules.table import Action, Table
from offbeat.schedules.timeline import Costs, timeline

GOLDEN = Path(__file__).parent / "golden"
ALL = [method() for method in METHODS]
ids = [method.name for method in ALL]


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_golden_schedule(method: Method) -> None:
    """Three stages, four steps, the drain: short enough to check by hand."""
    schedule = method.schedule(3)
    text = f"{schedule}\n\n{schedule.table(4)}\n\n{schedule.table(4).grid()}\n"
    assert (GOLDEN / f"{method.name}.txt").read_text() == text


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("method", ALL, ids=ids)
def test_claimed_lags_are_read_off_the_table(method: Method, stages: int) -> None:
    assert method.schedule(stages).lags == method.lags(stages)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("method", ALL, ids=ids)
def test_every_batch_is_forwarded_backwarded_and_applied_once(
    method: Method, stages: int, steps: int
) -> None:
    """Also with fewer batches than stages: the drain picks up whatever the fill began."""
    schedule = method.schedule(stages)
    table = schedule.table(steps)
    table.check()
    micro = list(range(steps * schedule.micro_batches))
    for stage in range(stages):
        for kind, numbers in (("F", micro), ("B", micro), ("U", list(range(steps)))):
            found = [action.batch for action in table.order(stage) if action.kind == kind]
            assert found == numbers


ACCUMULATING = [
    kind(accumulate=accumulate)
    for kind in METHODS
    if issubclass(kind, Asynchronous)
    for accumulate in (3, 4, 7)
]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("method", [*ALL, *ACCUMULATING], ids=str)
def test_after_step_n_a_stage_has_applied_n_minus_its_depth(method: Method, stages: int) -> None:
    """Its depth in whole batches: of its micro-batches in flight, those of a batch in one."""
    schedule = method.schedule(stages)
    parts = schedule.micro_batches
    for stage in range(stages):
        depth = -(-schedule.in_flight(stage) // parts)
        assert schedule.depth(stage) == depth
        done: dict[str, list[int]] = {"F": [], "B": [], "U": []}
        for n in range(2 * schedule.fill_steps + 3):
            for action in schedule.row(stage, n):
                done[action.kind].append(action.batch)
            assert done["F"] == list(range((n + 1) * parts))
            assert done["U"] == list(range(max(0, n + 1 - depth)))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("method", ALL, ids=ids)
def test_text_forms_parse_back(method: Method, stages: int) -> None:
    schedule = method.schedule(stages)
    assert Schedule.parse(str(schedule)) == schedule
    assert Table.parse(str(schedule.table(3))) == schedule.table(3)


@pytest.mark.parametrize(("stages", "accumulate"), [(3, 1), (3, 2), (3, 4), (5, 3), (2, 7)])
def test_adl_levels_of_staleness(stages: int, accumulate: int) -> None:
    readings = ADL(accumulate).schedule(stages).table(20).lags()
    steady = 15 * accumulate
    measured = [[of_stage[steady + j] for j in range(accumulate)] for of_stage in readings]
    assert measured == oracles.level_of_staleness(stages, accumulate)


def test_adl_levels_of_the_published_figure() -> None:
    assert oracles.level_of_staleness(3, 2) == [[2, 2], [1, 1], [0, 0]]
    assert oracles.level_of_staleness(3, 4) == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_dsp_timeline_of_the_published_figure() -> None:
    """DSP(1,1,0; 4,2,0): tick by tick, forward/backward of stages 0, 1, 2, batches from 1."""
    expected = [
        ["1/-", "-", "-"],
        ["2/-", "1/-", "-"],
        ["3/-", "2/-", "1/1"],
        ["4/-", "3/1", "2/2"],
        ["5/1", "4/2", "3/3"],
        ["6/2", "5/3", "4/4"],
    ]

    def cell(row: tuple[Action, ...]) -> str:
        found = {action.kind: str(action.batch + 1) for action in row}
        return f"{found['F']}/{found.get('B', '-')}" if row else "-"

    schedule = DSP(lag=(4, 2, 0), hop=(1, 1)).schedule(3)
    assert [[cell(row) for row in tick] for tick in schedule.ticks(6)] == expected


def test_lag_grows_while_the_pipe_fills() -> None:
    """min(n, m_k): the first batches are read before there is anything to lag behind."""
    readings = StaleWeights().schedule(3).table(8).lags()
    assert [list(of_stage.values()) for of_stage in readings] == [
        [0, 1, 2, 3, 4, 4, 4, 4],
        [0, 1, 2, 2, 2, 2, 2, 2],
        [0] * 8,
    ]


def test_deadlock_names_every_worker_and_what_it_waits_for() -> None:
    table = Table.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    with pytest.raises(Deadlock) as caught:
        table.check()
    assert str(caught.value) == (
        "nobody can go on:\n"
        "worker 0 waits at 0B0 for 1B0\n"
        "  0F0 0B0 0F1 0B1\n"
        "      ^\n"
        "worker 1 waits at 1F1 for 0F1\n"
        "  1F1 1B1 1F0 1B0\n"
        "  ^"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0X0", "'0X0' is not an action"),
        ("0F0 1B0", "'1B0' is on the line of stage 0"),
        ("", "an empty table"),
        ("0B0 0F0", "0B0 comes before 0F0 at stage 0"),
        ("0F0 0F0", "0F0 appears twice at stage 0"),
        (
            "0F0@1 0B0 0U0",
            r"0F0@1 reads a version that no update .* is 0\) at stage 0",
        ),
        ("0F0 0B0 0U0 0F1@1 0B1 0U1 0F2@3", r"0F2@3 reads .*\(the newest is 2\)"),
    ],
)
def test_bad_tables_get_words(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Table.parse(text).check()


@pytest.mark.parametrize("text", ["0F0 0B0 0U0 0F1@1 0B1 0U1", "0F0@0 0B0 0U0 0F1@0 0B1 0U1"])
def test_a_version_that_an_update_wrote_may_be_read(text: str) -> None:
    Table.parse(text).check()


def test_a_schedule_whose_parts_disagree_is_refused() -> None:
    text = str(StaleWeights().schedule(2))
    with pytest.raises(ScheduleError, match="the drain does not belong to the cycle"):
        Schedule.parse(text.replace("0B1 0U1 0B2 0U2", "0B1 0U1"))
    with pytest.raises(ScheduleError, match="has no 'cycle' part"):
        Schedule.parse("stage 0: fill - | drain -")
    with pytest.raises(ScheduleError, match="a cycle has 0 B actions"):
        Schedule.parse("stage 0: fill - | cycle 0F0 0U0 | drain -")


@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("chunks", [1, 4, 8])
def test_busy_share_of_gpipe_is_the_formula(stages: int, chunks: int) -> None:
    expected = chunks / (chunks + stages - 1)
    for method in (GPipe(chunks), OneFOneB(chunks)):
        measured = timeline(method, stages).busy_share
        assert measured == pytest.approx(expected)


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_ideal_speed_ups(stages: int) -> None:
    """K without recomputation; with it K times work over work plus recomputation."""
    assert timeline(StaleWeights(), stages).speed_up == pytest.approx(stages)
    assert timeline(DSP(), stages).speed_up == pytest.approx(0.75 * stages)
    free = Costs(recompute=0.0)
    assert timeline(DSP(), stages, costs=free).speed_up == pytest.approx(stages)


def test_a_hop_is_hidden_by_slack_and_exposed_without_it() -> None:
    """A message of half a forward costs PipeDream time every batch and StaleWeights none."""
    costs = Costs(hop=0.5)
    by_name = {m.name: timeline(m, 4, costs=costs).speed_up for m in ALL}
    assert by_name["stale-weights"] == pytest.approx(4.0)
    assert by_name["pipedream"] < 3.5
    assert by_name["ddg"] < by_name["pipedream"]


def test_an_uneven_cut_is_bound_by_its_dearest_stage() -> None:
    result = timeline(StaleWeights(), 2, costs=Costs(share=(3, 1)))
    assert result.speed_up == pytest.approx(4 / 3)
    assert result.busy_share == pytest.approx(2 / 3)
