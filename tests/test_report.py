"""The report's page: a function of stored runs, whatever they hold."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from offbeat.app.report import page, write_report
from offbeat.app.report.facts import MOST_POINTS, facts_of
from offbeat.app.report.timelines import measured, planned, planned_entries
from offbeat.app.runs import CONFIG, LEDGER, SUMMARY, Run
from offbeat.errors import ConfigurationError
from offbeat.methods import ADL, DSP, Method, PipeDream, StaleWeights, method_named
from offbeat.records.ledger import Ledger, lags_of
from offbeat.schedules.timeline import timeline
from stored_runs import (
    EPOCH_STEPS,
    EPOCHS,
    HOSTILE,
    STAGES,
    Seen,
    changed,
    data_of,
    hostile_run,
    made_ledger,
    made_run,
)

# ---------------------------------------------------------------------------- the page's content


def test_a_page_says_in_one_sentence_what_was_run_and_what_came_out(tmp_path: Path) -> None:
    words = Seen(page([made_run(tmp_path / "stale")])).words
    assert (
        "stale trained digits-cnn with stale-weights over 4 stages, lag 6, 4, 2, 0 updates;"
        " finished after 60 steps in 30 s, 90.0 % accuracy and loss 0.3125."
    ) in words


def test_a_page_has_every_part_under_a_heading(tmp_path: Path) -> None:
    seen = Seen(page([made_run(tmp_path / "a", replicas=2), made_run(tmp_path / "b")]))
    for heading in (
        "Verdict", "Comparison", "Curves", "Stages", "Timeline", "Lag", "Memory",
        "Waiting and stragglers", "Configuration", "How to read this page",
    ):  # fmt: skip
        assert heading in seen.words
    assert seen.tags.count("h1") == 1 and seen.tags.count("h2") == 10
    assert seen.tags.count("table") == seen.tags.count("caption")
    assert ("name", "viewport") in seen.attributes and ("lang", "en") in seen.attributes


def test_gradients_are_shown_where_guards_saw_them(tmp_path: Path) -> None:
    seen = {
        "updates": 60, "dropped": 3, "skipped": 2, "rolled_back": 1, "clipped": 17,
        "not_finite": 3, "median_norm": 0.4375, "largest_norm": 12.5, "largest_lag": 6,
    }  # fmt: skip
    guarded = {"0/1": seen | {"clipped": None, "median_norm": None}, "0/0": seen}
    run = changed(made_run(tmp_path / "guarded"), SUMMARY, guards=guarded)
    words = Seen(page([run])).words
    head = "stageupdatesnorm, mediannorm, largestclippednot finiteskippedrolled backlag, largest"
    assert f"Gradients, per stage{head}" in words
    assert "stage 0600.437512.5173216stage 160-12.5-3216" in words
    bare = made_run(tmp_path / "bare")
    assert "Gradients" not in Seen(page([bare])).words
    assert "This run had no guards." in Seen(page([run, bare])).words
    for damaged in ({"x": 1}, {"0/0": {"updates": "many"}}, [3]):
        assert "Configuration" in Seen(page([changed(run, SUMMARY, guards=damaged)])).words


def test_settings_that_differ_are_marked(tmp_path: Path) -> None:
    text = page([made_run(tmp_path / "a"), made_run(tmp_path / "b", config={"seed": 2})])
    assert '<b title="differs">seed</b>' in text
    assert (
        '<th scope="row"><b title="differs">seed</b></th><td><div>-</div><div>2</div></td>' in text
    )
    shared = text[text.index("settings that all runs share") :]
    assert '<th scope="row">optimizer.lr</th><td>0.02</td>' in shared


def test_settings_of_one_group_stand_together(tmp_path: Path) -> None:
    text = page([made_run(tmp_path / "a"), made_run(tmp_path / "b", "adl", accumulate=4)])
    rows = re.findall(r'<th scope="row">(?:<b title="differs">)?([a-z_.]+)<', text)
    groups = [row.partition(".")[0] for row in rows if row.startswith(("method", "optimizer"))]
    assert "method.settings.accumulate" in rows
    assert groups == sorted(groups)


def test_cuts_that_the_first_batch_decided_are_shown(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", config={"cuts": []})
    assert '<th scope="row">cuts</th><td>-</td>' in page([run])
    known = page([changed(run, SUMMARY, cuts=[2, 4, 6])])
    assert '<th scope="row">cuts</th><td>2, 4, 6</td>' in known
    asked = page([changed(run, CONFIG, cuts=["1", "3", "5"])])
    assert '<th scope="row">cuts</th><td>1, 3, 5</td>' in asked


def test_a_command_stored_as_words_can_be_pasted(tmp_path: Path) -> None:
    typed = ["/bin/offbeat", "train", "--model", "mlp:hidden=(32,)", "--out", "my runs"]
    run = made_run(tmp_path / "run", config={"command": typed})
    assert (
        "/bin/offbeat train --model 'mlp:hidden=(32,)' --out 'my runs'" in Seen(page([run])).words
    )


def test_bars_of_several_runs_have_one_scale(tmp_path: Path) -> None:
    small, large = made_run(tmp_path / "small"), made_run(tmp_path / "large")
    memory = [{"weight_bytes": 8_000_000, "in_flight_bytes": 2_000_000}]
    text = page([small, changed(large, SUMMARY, memory=memory)])
    widths = re.findall(r'style="width:([\d.]+)%" class="weights"', text)
    assert widths == ["20.0"] * STAGES + ["80.0"]
    kept = re.findall(r'style="width:([\d.]+)%" class="kept"', text)
    assert kept == ["10.0"] * STAGES  # of an older run nothing is known


def test_runs_of_one_name_get_labels_that_tell_them_apart(tmp_path: Path) -> None:
    first, second = made_run(tmp_path / "x" / "run"), made_run(tmp_path / "y" / "run")
    labels = [facts.label for facts in facts_of([first, second, second])]
    assert labels == ["x/run", "y/run", "y/run (2)"]


def test_no_runs_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no runs"):
        page([])


@pytest.mark.parametrize(
    ("file", "missing", "sentence"),
    [
        (SUMMARY, "memory", "No memory was recorded."),
        (SUMMARY, "busy_share", "No busy shares were recorded."),
        (SUMMARY, "waits", "One replica: there are no averages to wait for."),
        (SUMMARY, "lags", "No lags were recorded."),
        (CONFIG, "method", "The planned timeline is left out: the configuration does not name"),
        (CONFIG, "model", "trained a model with stale-weights"),
    ],
)
def test_a_missing_part_is_a_sentence(
    tmp_path: Path, file: str, missing: str, sentence: str
) -> None:
    run = changed(made_run(tmp_path / "run"), file, **{missing: None})
    assert sentence in Seen(page([run])).words


def test_a_killed_run_without_ledger_and_summary_has_a_page(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run.folder / SUMMARY).unlink()
    (run.folder / LEDGER).unlink()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    (run.folder / "metrics.jsonl").write_text("\n".join([*lines[:30], '{"kind": "st']))
    words = Seen(page([Run.load(run.folder)])).words
    for sentence in (
        "no end was recorded: it was killed, or is still running after 29 steps in 14.5 s",
        "No ledger was kept",
        "No lags were recorded.",
        "No memory was recorded.",
    ):
        assert sentence in words


def test_a_run_of_nothing_has_a_page(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    words = Seen(page([Run.load(tmp_path)])).words
    for sentence in (
        "trained a model with an unknown method",
        "no score was recorded",
        "No training loss was recorded.",
        "No evaluation was recorded",
        "No accuracy was recorded",
        "The configuration is empty.",
    ):
        assert sentence in words


def test_a_run_without_accuracy_shows_its_loss(tmp_path: Path) -> None:
    words = Seen(page([made_run(tmp_path / "text", accuracy=None)])).words
    assert "loss 0.3125." in words and "No accuracy was recorded" in words


@pytest.mark.parametrize("value", [7, "text", [1, [2]], {"a": {"b": None}}, True, -3, 1e400])
@pytest.mark.parametrize("file", [CONFIG, SUMMARY])
def test_a_page_is_made_whatever_kind_of_value_a_key_holds(
    tmp_path: Path, file: str, value: Any
) -> None:
    """Files may come from another version, or from a hand."""
    run = made_run(tmp_path / "run", steps=4)
    keys = json.loads((run.folder / file).read_text())
    assert page([changed(run, file, **dict.fromkeys(keys, value))])


def test_phases_leave_the_plan_out_with_the_reason(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", config={"method": {"name": "phases", "settings": {}}})
    text = page([run])
    assert "The planned timeline is left out: " in Seen(text).words
    assert len(data_of(text)["timelines"]) == 1


def test_a_damaged_ledger_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (run.folder / LEDGER).write_text("{}\n")
    assert "it cannot be read" in Seen(page([run])).words


def test_a_failed_run_says_so(tmp_path: Path) -> None:
    run = changed(made_run(tmp_path / "run"), SUMMARY, status="failed")
    assert "failed after 60 steps" in Seen(page([run])).words


# ---------------------------------------------------------------------------- escaping, size


def test_everything_shown_is_escaped(tmp_path: Path) -> None:
    # A run given twice is labelled with its parent, here "</script>...": it ends a script's text.
    twice = made_run(tmp_path / "<" / "script><img src=x onerror=alert(2)>")
    text = page([hostile_run(tmp_path), changed(twice, CONFIG, lr=0.5), twice])
    seen = Seen(text)
    assert seen.tags.count("script") == 2, "the data and the page's own script"
    assert "img" not in seen.tags
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert HOSTILE in seen.words
    assert data_of(text)["curves"][1]["label"] == "</script><img src=x onerror=alert(2)>"


def test_a_page_asks_for_nothing_outside_itself(tmp_path: Path) -> None:
    text = page([made_run(tmp_path / "a"), made_run(tmp_path / "b")])
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<]*", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == {"chrome://tracing."}
    assert not re.search(r"@import|url\(|<link|\bsrc=|fetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text


def test_a_page_of_two_thousand_actions_is_under_a_megabyte(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=168)
    assert len(run.ledger() or ()) >= 2000
    assert len(page([run]).encode()) < 400_000


def test_a_long_ledger_is_cut_to_its_end_and_the_page_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=900)
    text = page([run])
    assert "the last 10,000 actions; 800 earlier ones are in the trace only" in Seen(text).words
    assert len(data_of(text)["timelines"][0]["start"]) == 10_000


# ---------------------------------------------------------------------------- the page's numbers


def test_time_per_step_leaves_out_the_first_step_and_evaluations(tmp_path: Path) -> None:
    """A first step of 3 s, others of 105 ms, and an evaluation of 20 s after every fifth."""
    run, ledger, now = made_run(tmp_path / "run"), Ledger(), 2.895
    for step in range(20):
        now += 0.105 + 20 * (step > 0 and step % 5 == 0)
        ledger.record("U", 0, step, step + 1, now - 0.09, now - 0.08)  # of another stage
        ledger.record("U", 1, step, step + 1, now, now)
    ledger.save(run.folder / LEDGER)
    (facts,) = facts_of([changed(run, SUMMARY, steps=20, time_s=now)])
    assert facts.step_s == pytest.approx(0.105)
    (run.folder / LEDGER).unlink()
    (facts,) = facts_of([run])
    assert facts.step_s is None


@pytest.mark.parametrize("method", ["pipedream", "dsp", "adl", "synchronous"])
def test_the_plan_has_the_costs_of_the_run_s_own_stages(tmp_path: Path, method: str) -> None:
    """The first stage takes 30 of 36.3: no order of work is faster than 1.21 devices."""
    run = made_run(tmp_path / "run", method, share=(30, 2.1, 2.1, 2.1))
    words, equal = Seen(page([run])).words, timeline(method_named(method), STAGES).speed_up
    recomputed = {"synchronous": 1.0, "dsp": 36.3 / 40}
    ideal = recomputed.get(method, 1.21)
    assert f"ideal speed-up {ideal:.2f}; {equal:.2f}, were all stages equal" in words
    assert data_of(page([run]))["timelines"][1]["unit"] == "s"


def test_without_a_ledger_the_plan_has_equal_stages_and_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "pipedream", share=(30, 2.1, 2.1, 2.1))
    (run.folder / LEDGER).unlink()
    words = Seen(page([run])).words
    assert "with equal stages: a batch's forward takes 1, its backward 2" in words
    assert "ideal speed-up 4.00" in words


def test_the_plan_of_a_hybrid_is_that_of_its_first_phase(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", config={"hybrid": 2})
    assert "Planned of the first phase, with equal stages" in Seen(page([run])).words


def test_actions_carry_the_ledgers_lags_and_losses(tmp_path: Path) -> None:
    ledger = made_ledger(StaleWeights(), 12)
    columns = measured(ledger).columns()
    of_stage_0 = {
        batch: lag
        for batch, lag, kind, stage in zip(
            columns["batch"], columns["lag"], columns["kind"], columns["stage"], strict=True
        )
        if (kind, stage) == ("B", 0)
    }
    assert of_stage_0 == ledger.lags(0)
    losses = [loss for loss in columns["loss"] if loss is not None]
    assert losses == [2.5] * 12


@pytest.mark.parametrize("method", [StaleWeights(), ADL(accumulate=4), PipeDream(), DSP()])
def test_planned_actions_have_the_lags_of_the_table(method: Method) -> None:
    table = method.schedule(3).table(7)
    entries = planned_entries(timeline(method, 3, steps=7))
    expected = {
        (0, stage, batch): lag
        for stage, of_stage in enumerate(table.lags())
        for batch, lag in of_stage.items()
    }
    assert lags_of(entries) == expected
    assert planned(timeline(method, 3, steps=7)).lines == ["stage 0", "stage 1", "stage 2"]


def test_the_end_of_a_ledger_has_lags_where_the_forward_is_known() -> None:
    whole = made_ledger(StaleWeights(), 12)
    last = [entry for entry in whole if entry.start_s > 0.2]
    known = {(e.replica, e.stage, e.batch) for e in last if e.kind == "F"}
    found = lags_of(last)
    assert found.keys() == known and len(found) < len(lags_of(whole))
    assert found.items() <= lags_of(whole).items()


def test_averages_under_way_have_lines_of_their_own() -> None:
    lines = measured(made_ledger(StaleWeights(), 6, replicas=2)).lines
    assert lines[:3] == ["r0 stage 0", "r0 avg 0", "r0 stage 1"]
    assert len(lines) == 2 * 2 * STAGES


def test_a_curve_of_many_steps_is_drawn_through_means(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    lines = [
        {"kind": "step", "step": n, "epoch": n / 100, "time_s": n, "loss": n % 2}
        for n in range(10 * MOST_POINTS)
    ]
    (facts,) = facts_of([Run(run.folder, run.config, lines, {})])
    assert len(facts.training_loss) == MOST_POINTS
    assert {point.value for point in facts.training_loss} == {0.5}
    assert facts.training_loss[-1].epoch == pytest.approx(39.99)


def test_a_loss_that_is_no_number_is_said_and_left_out(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    run.metrics[5]["loss"] = math.nan
    text = page([run])
    assert "The training loss was not a finite number at step 6." in Seen(text).words
    assert len(data_of(text)["curves"][0]["training_loss"]["value"]) == EPOCHS * EPOCH_STEPS - 1


# ---------------------------------------------------------------------------- files


def test_a_report_is_a_page_and_traces(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "bp", "synchronous"), hostile_run(tmp_path)]
    written = write_report(runs, tmp_path / "out")
    names = {path.name for path in written}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    traces = {"trace-bp.json", "trace-img-src-x-onerror-alert-1-x_-quot.json"}
    assert names == {"report.html"} | traces
    ledger = runs[0].ledger()
    assert ledger is not None
    trace = json.loads((tmp_path / "out" / "trace-bp.json").read_text())
    assert trace == json.loads(json.dumps(ledger.chrome_trace()))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file/report.html cannot be written: "):
        write_report([made_run(tmp_path / "run")], tmp_path / "file")
