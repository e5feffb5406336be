"""Figures and the page: functions of stored data; the page is used in a real browser too."""

import io
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.app.report import draw_curves, draw_timelines, in_turn, page, write_report
from offbeat.app.report.facts import MOST_POINTS, facts_of
from offbeat.app.report.timelines import measured, planned, planned_entries
from offbeat.app.runs import CONFIG, LEDGER, SUMMARY, Run, RunWriter
from offbeat.errors import ConfigurationError, OffbeatError
from offbeat.methods import ADL, DSP, Method, PipeDream, StaleWeights, Synchronous, method_named
from offbeat.records.ledger import Ledger, lags_of
from offbeat.schedules.timeline import Timeline, timeline

METHODS: dict[str, Method] = {
    "BP": Synchronous(),
    "StaleWeights": StaleWeights(),
    "DSP": DSP(),
    "ADL": ADL(accumulate=4),
}


@pytest.fixture
def timelines() -> dict[str, Timeline]:
    return {name: timeline(method, 4, steps=5) for name, method in METHODS.items()}


def is_png(figure: Any) -> bool:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue().startswith(b"\x89PNG") and len(buffer.getvalue()) > 5_000


def boxes(axes: Any) -> int:
    return sum(len(collection.get_paths()) for collection in axes.collections)


def test_timelines_have_one_panel_per_method_with_its_rates(
    timelines: dict[str, Timeline],
) -> None:
    figure = draw_timelines(timelines)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "BP: busy 25%, speed-up 1.00"
    assert titles[1] == "StaleWeights: busy 100%, speed-up 4.00"
    assert len(titles) == len(METHODS)
    assert is_png(figure)


def test_every_forward_and_backward_is_one_box(timelines: dict[str, Timeline]) -> None:
    """5 steps, 4 stages, 2 kinds; ADL four times as many micro-batches."""
    figure = draw_timelines(timelines)
    assert [boxes(axes) for axes in figure.axes] == [40, 40, 40, 160]


def test_panels_share_one_time_axis_with_a_row_per_stage(timelines: dict[str, Timeline]) -> None:
    figure = draw_timelines(timelines)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, timelines["BP"].duration)}
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            f"stage {k}" for k in range(4)
        ]


def test_until_ends_the_axis_and_no_number_stands_outside(timelines: dict[str, Timeline]) -> None:
    figure = draw_timelines(timelines, until=7.5)
    for axes in figure.axes:
        assert axes.get_xlim() == (0, 7.5)
        assert all(text.get_position()[0] < 7.5 for text in axes.texts)


def test_numbers_stand_only_in_boxes_that_hold_them(timelines: dict[str, Timeline]) -> None:
    """Measured on the rendered text: no number is wider than its box."""
    figure = draw_timelines(timelines, until=36)
    assert is_png(figure)  # lays the text out
    for axes, line in zip(figure.axes, timelines.values(), strict=True):
        to_pixels = axes.transData.transform
        spans = {((s.start + s.end) / 2, s.action.stage): s for s in line.spans if s.end > s.start}
        for text in axes.texts:
            x, y = text.get_position()
            span = spans[x, round(y)]
            left, right = to_pixels((span.start, 0))[0], to_pixels((span.end, 0))[0]
            assert text.get_text() == str(span.action.batch)
            assert text.get_window_extent().width < right - left
    assert len(figure.axes[0].texts) == 24  # BP: 3 batches, F and B of 4 stages


def test_curves_are_the_given_points_with_a_legend_beside_them() -> None:
    runs = {"BP": [(1, 0.5), (2, 0.9)], "StaleWeights": [(1, 0.4), (2, 0.8)]}
    figure = draw_curves(runs, ylabel="accuracy", title="two runs")
    (axes,) = figure.axes
    assert len(axes.lines) == 2
    points = np.asarray(axes.lines[1].get_xydata()).tolist()
    assert [tuple(point) for point in points] == runs["StaleWeights"]
    assert len({line.get_color() for line in axes.lines}) == 2
    assert axes.get_ylabel() == "accuracy"
    assert is_png(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1


def test_more_runs_than_colours_can_be_drawn() -> None:
    figure = draw_curves({f"run {k}": [(1, k)] for k in range(12)})
    assert len(figure.axes[0].lines) == 12


@pytest.mark.parametrize("draw", [draw_timelines, draw_curves])
def test_nothing_to_draw_is_refused(draw: Any) -> None:
    with pytest.raises(ConfigurationError, match="nothing to draw"):
        draw({})


@pytest.mark.parametrize("draw", [draw_timelines, draw_curves])
def test_missing_matplotlib_is_answered_with_what_to_install(
    draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    given = {"BP": timeline(Synchronous(), 2)} if draw is draw_timelines else {"BP": [(1, 0.5)]}
    with pytest.raises(OffbeatError, match=r"pip install matplotlib"):
        draw(given)


def test_drawing_never_imports_pyplot_and_importing_never_matplotlib() -> None:
    program = """
import io, sys
from offbeat.app.report import draw_curves, draw_timelines
from offbeat.methods import Synchronous
from offbeat.schedules.timeline import timeline
assert "matplotlib" not in sys.modules
draw_curves({"BP": [(1, 0.5)]}).savefig(io.BytesIO(), format="png")
draw_timelines({"BP": timeline(Synchronous(), 2)}).savefig(io.BytesIO(), format="png")
assert "matplotlib.figure" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------------------- phases


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_phases_have_the_papers_hybrid_speed_up(share: float) -> None:
    fast, plain = timeline(StaleWeights(), 4), timeline(Synchronous(), 4)
    hybrid = in_turn([(fast, round(1000 * share)), (plain, round(1000 * (1 - share)))])
    assert hybrid.speed_up == pytest.approx(1 / (share / fast.speed_up + 1 - share))
    assert hybrid.busy_share == pytest.approx(hybrid.speed_up / 4)


def test_phases_follow_each_other_and_count_batches_on() -> None:
    fast, plain = timeline(PipeDream(), 3, steps=4), timeline(Synchronous(), 3, steps=2)
    joined = in_turn([(fast, 4), (plain, 2)])
    assert joined.duration == fast.duration + plain.duration
    later = [span for span in joined.spans if span.start >= fast.duration and span.end > span.start]
    assert {span.action.batch for span in later} == {4, 5}
    assert joined.spans[: len(fast.spans)] == fast.spans


def test_phases_count_micro_batches_and_updates_each_by_their_own() -> None:
    first, then = timeline(ADL(accumulate=4), 2, steps=3), timeline(Synchronous(), 2, steps=1)
    last = in_turn([(first, 3), (then, 1)]).spans[-len(then.spans) :]
    assert {str(span.action) for span in last} == {"0F12", "1F12", "1B12", "1U3", "0B12", "0U3"}


def test_phases_with_different_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="same number of stages"):
        in_turn([(timeline(Synchronous(), 2), 1), (timeline(Synchronous(), 3), 1)])


# ---------------------------------------------------------------------------- made-up runs

STAGES, EPOCHS, EPOCH_STEPS = 4, 3, 20


def made_ledger(method: Method, steps: int, replicas: int = 1) -> Ledger:
    """The planned order of work, 10 ms a forward; with replicas also averages."""
    ledger = Ledger()
    for replica in range(replicas):
        for e in planned_entries(timeline(method, STAGES, steps=steps)):
            start, end = e.start_s / 100, e.end_s / 100
            loss = 2.5 if (e.kind, e.stage) == ("F", STAGES - 1) else None
            ledger.record(e.kind, e.stage, e.batch, e.version, start, end, loss, replica)
            if replicas > 1 and e.kind == "U":
                ledger.record("A", e.stage, e.batch, e.version, end, end + 0.005, None, replica)
                ledger.record("M", e.stage, e.batch, e.version, end + 0.004, end + 0.006, None, 0)
    return ledger


def made_run(
    folder: Path,
    method: str = "stale-weights",
    *,
    accuracy: float | None = 0.9,
    replicas: int = 1,
    steps: int = 12,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """A finished run with every part that a run can have."""
    built = method_named(method, **settings)
    words = {
        "model": {"name": "digits-cnn", "settings": {"width": 16}},
        "method": {"name": method, "settings": settings},
        "averaging": {"name": "dasgd", "settings": {"every": 4}} if replicas > 1 else None,
        "replicas": replicas,
        "stages": STAGES,
        "lags": list(built.lags(STAGES)),
        "optimizer": {"name": "sgd", "lr": 0.02},
        "command": "offbeat train",
        "versions": {"offbeat": "0.2", "torch": "2.13"},
    }
    ledger = made_ledger(built, steps, replicas)
    writer = RunWriter(folder, words | (config or {}))
    total = EPOCHS * EPOCH_STEPS
    for step in range(1, total + 1):
        at = {"step": step, "epoch": step / EPOCH_STEPS, "time_s": step * 0.5}
        writer.add("step", **at, loss=2.0 / step, rows_per_s=128.0, lr=0.02)
        if step % EPOCH_STEPS == 0:
            reached = None if accuracy is None else accuracy * step / total
            writer.add("evaluation", **at, loss=1 / step, accuracy=reached, rows=359, of="average")
    writer.add("end", step=total, epoch=EPOCHS, time_s=total * 0.5, status="finished")
    counts: dict[str, dict[str, int]] = {}
    for (_, stage, _), lag in lags_of(ledger).items():
        of_stage = counts.setdefault(str(stage), {})
        of_stage[str(lag)] = of_stage.get(str(lag), 0) + 1
    memory = {"weight_copies": 1, "peak_weight_copies": 2, "graphs": 3, "inputs": 0}
    memory |= {"peak_in_flight": 4, "weight_bytes": 2_000_000, "in_flight_bytes": 500_000}
    memory |= {"correction_bytes": 1_000_000}
    wait = {"averages": 7, "total_s": 0.25, "longest_s": 0.125}
    places = [f"{replica}/{stage}" for replica in range(replicas) for stage in range(STAGES)]
    summary = {
        "status": "finished",
        "steps": total,
        "epochs": EPOCHS,
        "time_s": total * 0.5,
        "loss": 0.3125,
        "accuracy": accuracy,
        "rows_per_s": 256.0,
        "lags": counts,
        "memory": [memory] * (STAGES * replicas),
        "waits": dict.fromkeys(places, wait) if replicas > 1 else {},
        "busy_share": [0.5, 0.25, 0.75, 1.0],
    }
    writer.finish(summary, ledger)
    return Run.load(folder)


def changed(run: Run, file: str, **values: Any) -> Run:
    """The run with keys of one of its JSON files replaced; None takes a key away."""
    path = run.folder / file
    kept = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return Run.load(run.folder)


class Seen(HTMLParser):
    """Elements and text of a page, as a browser would take it apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("script", "style"):
            self.words += data.replace("\xa0", " ")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


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
        "Summary", "Comparison", "Curves", "Timeline", "Lag", "Memory", "Waiting",
        "Configuration", "How to read this page",
    ):  # fmt: skip
        assert heading in seen.words
    assert seen.tags.count("h1") == 1 and seen.tags.count("h2") == 9
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


def test_runs_are_compared_with_the_synchronous_one(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "stale", accuracy=0.9),
        made_run(tmp_path / "bp", "synchronous", accuracy=0.925),
    ]
    words = Seen(page(runs)).words
    assert "gap to bp, points" in words and "baseline" in words
    assert "-2.5" in words and "500 ms" in words and "256" in words


def test_runs_without_an_accuracy_are_compared_by_loss(tmp_path: Path) -> None:
    plain = made_run(tmp_path / "bp", "synchronous", accuracy=None)
    late = made_run(tmp_path / "late", "adl", accuracy=None, accumulate=3)
    runs = [changed(plain, SUMMARY, loss=2.0), changed(late, SUMMARY, loss=2.125)]
    words = Seen(page(runs)).words
    assert "adl:accumulate=3" in words
    assert "gap to bp, in loss" in words and "+0.1250" in words


def test_without_a_synchronous_run_the_page_gives_no_gap(tmp_path: Path) -> None:
    words = Seen(page([made_run(tmp_path / "a"), made_run(tmp_path / "b", "adl")])).words
    assert "None of the runs is synchronous" in words and "gap to" not in words


def test_settings_that_differ_are_marked(tmp_path: Path) -> None:
    text = page([made_run(tmp_path / "a"), made_run(tmp_path / "b", config={"seed": 2})])
    assert '<b title="differs">seed</b>' in text
    assert '<th scope="row">optimizer.lr</th><td>0.02</td><td>0.02</td>' in text


def test_settings_of_one_group_stand_together(tmp_path: Path) -> None:
    text = page([made_run(tmp_path / "a"), made_run(tmp_path / "b", "adl", accumulate=4)])
    rows = re.findall(r'<th scope="row">(?:<b title="differs">)?([a-z_.]+)<', text)
    groups = [row.partition(".")[0] for row in rows if row.startswith(("method", "optimizer"))]
    assert "method.settings.accumulate" in rows
    assert groups == sorted(groups)


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
        (SUMMARY, "lags", "Counted over the actions that the ledger kept"),
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

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def hostile_run(folder: Path) -> Run:
    name = '"><img src=x onerror=alert(1)>$x_{&quot;'
    config = {
        "model": {"name": HOSTILE},
        HOSTILE: HOSTILE,
        "command": [HOSTILE, {HOSTILE: [HOSTILE]}],
        "method": {"name": HOSTILE, "settings": {HOSTILE: HOSTILE}},
        "averaging": {"name": HOSTILE},
    }
    run = made_run(folder / name, replicas=2, config=config)
    return changed(run, SUMMARY, status=HOSTILE)


def test_everything_shown_is_escaped(tmp_path: Path) -> None:
    # A run given twice is labelled with its parent, here "</script>...": it ends a script's text.
    twice = made_run(tmp_path / "<" / "script><img src=x onerror=alert(2)>")
    text = page([hostile_run(tmp_path), twice, twice])
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


def test_waits_are_read_off_the_ledger_where_the_summary_has_none(tmp_path: Path) -> None:
    run = changed(made_run(tmp_path / "run", replicas=2), SUMMARY, waits=None)
    (facts,) = facts_of([run])
    ledger = run.ledger()
    assert ledger is not None
    assert [wait.stage for wait in facts.waits] == list(range(STAGES))
    assert facts.waits[0].numbers["total_s"] == sum(ledger.waits(0).values()) > 0


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


# ---------------------------------------------------------------------------- in a browser

# Chromium talks over descriptors 3 and 4; Python cannot promise which numbers a pipe gets.
_ON_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_ANSWER_S = 20.0


def chromium() -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    cache = Path.home() / ".cache" / "ms-playwright"
    builds = [p for n in ("chrome", "headless_shell") for p in cache.glob(f"chromium*/*/{n}")]
    return str(builds[0]) if builds else None


class Browser:
    """Headless Chromium, driven over its DevTools pipe."""

    def __init__(self, program: str, profile: Path) -> None:
        its_input, self._write = os.pipe()
        self._read, its_output = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "--no-first-run", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_3_AND_4, str(its_input), str(its_output), program, *flags],
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._calls:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _ANSWER_S
        while b"\0" not in self._buffer:
            left = max(0.0, end - time.monotonic())
            assert select.select([self._read], [], [], left)[0], "the browser is silent"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        finally:
            os.close(self._write)
            os.close(self._read)
            self._process.wait(_ANSWER_S)

    # What a person does and sees.

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())
        self.settle()

    def settle(self) -> None:
        """Two frames: whatever was asked for has been drawn."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.js(f"new Promise(done => {frames})")

    def js(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def problems(self) -> list[dict[str, Any]]:
        """Exceptions, anything on the console, and requests for anything but the page."""
        self.settle()
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        said = [event for event in self.events if event["method"] in kinds]
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return said + asked[1:]

    def place_of(self, selector: str) -> tuple[float, float]:
        """The top left corner of an element, scrolled into view."""
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{behavior: 'instant'}})")
        corner = f"document.querySelector({selector!r}).getBoundingClientRect()"
        left, top = self.js(f"(() => {{ const r = {corner}; return [r.left, r.top]; }})()")
        return left, top

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)
        self.settle()

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r}).innerText"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium, to run the page in a browser")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@dataclass(frozen=True)
class Pages:
    """Pages on disk, made once."""

    one: Path
    several: Path
    hostile: Path
    empty: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    folder = tmp_path_factory.mktemp("runs")
    one = made_run(folder / "stale", steps=40)
    several = [one, made_run(folder / "bp", "synchronous"), made_run(folder / "two", replicas=2)]
    script = made_run(folder / "<" / "script><script>document.title='taken'")
    (folder / "empty").mkdir()
    (folder / "empty" / CONFIG).write_text("{}")
    of = {
        "one": [one],
        "several": several,
        "hostile": [hostile_run(folder), script, script],
        "empty": [Run.load(folder / "empty")],
    }
    paths = {name: folder / f"{name}.html" for name in of}
    for name, runs in of.items():
        paths[name].write_text(page(runs), encoding="utf-8")
    return Pages(**paths)


FIRST = (8, 22 + 10)
"""From the corner of a timeline's plot to the middle of the first action of its first row."""


def first_action(browser: Browser) -> tuple[float, float]:
    left, top = browser.place_of("canvas")
    # Row names stand left of the plot; the script knows their width, a reader sees it.
    pen = "document.querySelector('canvas').getContext('2d')"
    gutter = browser.js(f"Math.ceil({pen}.measureText('stage 0').width) + 10")
    return left + gutter + FIRST[0], top + FIRST[1]


def test_the_harness_sees_errors_and_requests(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src=missing.png><script>console.error('a'); throw Error('b')</script>")
    browser.open(bad)
    assert len(browser.problems()) >= 3


@pytest.mark.parametrize("name", ["one", "several", "hostile", "empty"])
@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_render_without_a_word_on_the_console(
    browser: Browser, pages: Pages, name: str, width: int, dark: bool
) -> None:
    browser.open(getattr(pages, name), width=width, dark=dark)
    assert browser.problems() == []
    assert browser.js("document.title").endswith("offbeat report")
    assert browser.js("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll')"
    wide += f" && e.getBoundingClientRect().right > {width + 1}).map(e => e.outerHTML)"
    assert browser.js(wide) == []


def test_a_click_on_the_timeline_shows_the_action(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one)
    browser.click(*first_action(browser))
    shown = browser.text(".details").split("\n")
    facts = dict(zip(shown[::2], shown[1::2], strict=True))
    assert facts == {
        "action": "forward (0F0)",
        "stage": "0",
        "replica": "0",
        "batch": "0",
        "version read": "0",
        "lag": "0 updates",
        "start": "0 s",
        "duration": "10 ms",
    }
    assert browser.problems() == []


def test_a_tap_on_a_phone_shows_the_action(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one, width=375)
    browser.tap(*first_action(browser))
    assert "forward (0F0)" in browser.text(".details")


def test_two_fingers_zoom_the_timeline(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one, width=375)
    before = browser.text(".range")
    x, y = first_action(browser)
    for kind, apart in (("touchStart", 40), ("touchMove", 80), ("touchMove", 120)):
        fingers = [{"x": x + 100 - apart, "y": y, "id": 0}, {"x": x + 100 + apart, "y": y, "id": 1}]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    assert browser.text(".range") != before
    assert browser.text(".details") == "No action chosen yet."
    assert browser.js("visualViewport.scale") == 1, "the timeline zooms, not the page"


def test_keys_go_from_action_to_action(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one)
    browser.js("document.querySelector('canvas').focus()")
    browser.press("ArrowRight")
    assert "forward (0F0)" in browser.text(".details")
    browser.press("ArrowRight")
    assert "forward (0F1)" in browser.text(".details")
    for _ in range(3):
        browser.press("ArrowDown")
    assert "(3F0)" in browser.text(".details") and "2.5" in browser.text(".details")
    browser.press("Escape")
    assert browser.text(".details") == "No action chosen."


def test_the_timeline_zooms_and_moves(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one)
    views = [browser.text(".range")]

    def seen() -> str:
        browser.settle()
        views.append(browser.text(".range"))
        return views[-1]

    for word in ("in", "out", "right", "all"):
        browser.js(f"document.querySelector('[data-do={word}]').click()")
        assert seen() != views[-2]
    assert views[-1].startswith("all: ")
    x, y = first_action(browser)
    browser.mouse("mouseWheel", x + 200, y, deltaX=0, deltaY=-120)
    assert seen() == views[-2], "a reader who scrolls the page is not caught"
    x, y = first_action(browser)  # the page has scrolled
    browser.click(x, y)
    browser.mouse("mouseWheel", x + 200, y, deltaX=0, deltaY=-120)
    assert seen() != views[-2]
    before = browser.text(".details")
    browser.mouse("mousePressed", x + 300, y, button="left", clickCount=1)
    for step in range(1, 6):
        browser.mouse("mouseMoved", x + 300 - 20 * step, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 200, y, button="left", clickCount=1)
    assert seen() != views[-2]
    assert browser.text(".details") == before, "a drag is no click"
    assert browser.problems() == []


def test_runs_can_be_hidden_and_curves_drawn_against_time(browser: Browser, pages: Pages) -> None:
    browser.open(pages.several)
    lines = "document.querySelectorAll('[data-chart=test_accuracy] path').length"
    axis = "[...document.querySelectorAll('[data-chart=test_accuracy] text')].at(-1).textContent"
    assert (browser.js(lines), browser.js(axis)) == (3, "epoch")
    browser.js("document.querySelector('[data-run=\"1\"]').click()")
    browser.js("document.querySelector('[data-axis=time]').click()")
    assert (browser.js(lines), browser.js(axis)) == (2, "time, s")
    pressed = "document.querySelector('[data-run=\"1\"]').getAttribute('aria-pressed')"
    assert browser.js(pressed) == "false"
    browser.js("document.querySelector('[data-run=\"1\"]').click()")
    assert browser.js(lines) == 3
    assert browser.problems() == []


def test_pointing_at_a_curve_shows_its_values(browser: Browser, pages: Pages) -> None:
    browser.open(pages.several)
    left, top = browser.place_of("[data-chart=test_accuracy] svg")
    browser.mouse("mouseMoved", left + 50, top + 60)
    browser.settle()
    shown = browser.text("[data-chart=test_accuracy] .tip").split()
    assert shown == ["epoch", "1", "stale", "30", "bp", "30", "two", "30"]


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_the_page(browser: Browser, pages: Pages, dark: bool) -> None:
    """WCAG's contrast of at least 4.5, for text and for notes."""
    browser.open(pages.one, dark=dark)

    def luminance(colour: str) -> float:
        shares = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        light = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return float(np.dot(light, (0.2126, 0.7152, 0.0722)))

    paper = luminance(browser.js("getComputedStyle(document.body).backgroundColor"))
    assert (paper < 0.05) == dark
    for selector in ("body", ".note", "nav a", "thead th"):
        ink = luminance(browser.js(f"getComputedStyle(document.querySelector('{selector}')).color"))
        high, low = max(ink, paper), min(ink, paper)
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector
