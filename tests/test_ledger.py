"""The ledger: saved, loaded, merged, drawn and traced without losing a number."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from helpers import mlp, trained, trainer_for, vector_batches
from jobs import pause
from offbeat.app.cli import main
from offbeat.engines.launcher import launch
from offbeat.errors import ConfigurationError
from offbeat.faults import Faults
from offbeat.methods import ADL, StaleWeights
from offbeat.records.ledger import Entry, Ledger
from offbeat.schedules.timeline import measured_timeline


@pytest.fixture
def ledger() -> Ledger:
    return trained(mlp(), vector_batches(6), StaleWeights(), cuts=[2, 4]).ledger


def same(one: Entry, other: Entry) -> bool:
    both_nan = math.isnan(one.loss) and math.isnan(other.loss)
    same_rest = one._replace(loss=0.0) == other._replace(loss=0.0)
    return same_rest and (both_nan or one.loss == other.loss)


def test_files_and_bytes_keep_every_entry(ledger: Ledger, tmp_path: Path) -> None:
    ledger.save(tmp_path / "run.jsonl")
    for copy in (Ledger.load(tmp_path / "run.jsonl"), Ledger.from_bytes(ledger.to_bytes())):
        assert len(copy) == len(ledger) == 3 * 3 * 6
        assert all(map(same, copy, ledger))


def test_merging_shifts_clocks_and_sorts() -> None:
    one, other = Ledger(), Ledger()
    one.record("F", 0, 0, 0, 10.0, 11.0)
    one.record("B", 0, 0, 0, 13.0, 14.0)
    other.record("F", 1, 0, 0, 101.0, 102.0, 0.5)
    merged = Ledger.merged([one, other], [0.0, -90.0])
    assert [(e.stage, e.kind, e.end_s) for e in merged] == [
        (0, "F", 11.0), (1, "F", 12.0), (0, "B", 14.0),
    ]  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pause_before_a_run_goes_on_is_no_waiting(tmp_path: Path, processes: int) -> None:
    """Stages were said to work 21 % of the time when it was 74 %: the rest was the pause."""
    if processes == 1:
        before, after = pause(str(tmp_path))
    else:
        before, after = launch(pause, 2, str(tmp_path), timeout_s=60)[0]
    starts = sorted(entry.start_s for entry in after)
    assert len(after) > len(before)
    assert max(later - earlier for earlier, later in pairwise(starts)) < 100
    # The stages' actions stand to each other as they stood.
    zeros = before[0].start_s, after[0].start_s
    for old, new in zip(before, after, strict=False):
        assert new.start_s - zeros[1] == pytest.approx(old.start_s - zeros[0], abs=0.05)


def test_a_measured_timeline_is_arithmetic() -> None:
    ledger = Ledger()
    ledger.record("F", 0, 0, 0, 5.0, 6.0)
    ledger.record("F", 1, 0, 0, 6.0, 7.0)
    ledger.record("B", 1, 0, 0, 7.0, 9.0)
    ledger.record("U", 1, 0, 1, 9.0, 9.0)
    found = measured_timeline(ledger)
    assert found.duration == 4.0
    assert found.busy_share == pytest.approx(4 / 8)
    assert found.speed_up == pytest.approx(1.0)
    with pytest.raises(ConfigurationError, match="the ledger is empty"):
        measured_timeline(Ledger())


def test_the_command_line_draws_a_saved_run(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    ledger.save(path)
    with pytest.raises(SystemExit) as ended:
        main(["timeline", "--measured", str(path), "--json"])
    assert ended.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert len(found["spans"]) == len(ledger)
    assert 0 < found["busy_share"] <= 1
    with pytest.raises(SystemExit):
        main(["timeline", "--measured", str(path)])
    assert "busy share" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--measured", "no-such-file"], "no-such-file cannot be read: No such file"),
        (["--measured", __file__], "line 1: not an entry of a ledger"),
        ([], "give either a METHOD or --measured FILE"),
        (["dsp", "--measured", "x"], "give either a METHOD or --measured FILE"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["timeline", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_trace_has_a_row_per_stage_and_microseconds(ledger: Ledger) -> None:
    trace = json.loads(json.dumps(ledger.chrome_trace()))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(ledger)
    assert {event["tid"] for event in events} == {0, 1, 2}
    assert min(event["ts"] for event in events) == 0.0
    first = ledger[0]
    assert events[0]["dur"] == pytest.approx((first.end_s - first.start_s) * 1e6)
    losses = [event["args"]["loss"] for event in events if "loss" in event["args"]]
    assert len(losses) == 6


def test_a_measured_picture_begins_after_a_slow_start_and_has_room_for_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger()
    ledger.record("F", 0, 0, 0, 0.0, 100.0)  # kernels are made, memory is taken
    for batch in range(1, 400):  # many parts of a step
        ledger.record("F" if batch % 2 else "B", 0, batch, 0, 100.0 + batch, 101.0 + batch)
    ledger.record("U", 0, 0, 1, 500.0, 500.0)
    ledger.save(tmp_path / "run.jsonl")
    with pytest.raises(SystemExit):
        main(["timeline", "--measured", str(tmp_path / "run.jsonl"), "--width", "60"])
    said = capsys.readouterr().out
    assert "stage 0  B200 F201 B202 F203" in said
    assert "10 s from 300 s on, of 500 s" in said


def test_options_that_a_measured_timeline_cannot_use_are_refused(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.save(tmp_path / "run.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["timeline", "--measured", str(tmp_path / "run.jsonl"), "--batches", "3"])
    assert ended.value.code == 2
    assert "--batches is about the model of a method" in capsys.readouterr().err


def test_a_ledger_says_what_it_holds(ledger: Ledger) -> None:
    assert repr(ledger) == "Ledger(54 actions of stages 0, 1, 2)"
    assert repr(Ledger()) == "Ledger(0 actions of stages none)"


def test_gradients_that_were_thrown_away_are_not_told_of_as_applied() -> None:
    """An error half-way through a batch, and a state that is loaded: the run goes on without it."""
    trainer = trainer_for(mlp(), ADL(4), cuts=[2, 4], faults=Faults().fail("0B22"))
    batches = vector_batches(12, rows=8)
    state = trainer.state_dict()
    with pytest.raises(RuntimeError):
        for x, y in batches:
            trainer.step(x, y)
    trainer.load_state_dict(state)
    for x, y in batches[:3]:
        trainer.step(x, y)
    trainer.flush()
    for stage in range(3):
        lags = trainer.ledger.lags(stage)
        assert ({20, 21} <= {*lags}) == (stage == 2)  # which had its update already
        assert max(lags.values()) <= trainer.lags[stage]
        assert len(lags) == 4 * sum((e.kind, e.stage) == ("U", stage) for e in trainer.ledger)
