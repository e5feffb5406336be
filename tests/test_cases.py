"""What a page says of several runs at once: configurations, gaps of pairs, the front, verdicts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from offbeat.app.cli import main
from offbeat.app.report import page
from offbeat.app.report.cases import Curve, cases_of
from offbeat.app.report.comparison import Comparison
from offbeat.app.report.curves import Front
from offbeat.app.report.facts import Point, facts_of
from offbeat.app.report.pace import Pace
from offbeat.app.runs import METRICS, SUMMARY, Run
from offbeat.methods import StaleWeights
from offbeat.records.ledger import Ledger
from offbeat.records.lock import Lock, this_process
from stored_runs import STAGES, Seen, changed, data_of, made_ledger, made_run


def seeded(folder: Path, method: str, seed: int, accuracy: float, **config: Any) -> Run:
    settings = {"seed": seed, "data": {"name": "digits", "settings": {}}, **config}
    name = folder / f"{method}-{seed}-{len(config)}"
    return made_run(name, method, accuracy=accuracy, config=settings)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Three seeds each: one method loses 4 points with every seed, one by chance alone."""
    scores = {
        "synchronous": (0.95, 0.96, 0.94),
        "stale-weights": (0.91, 0.92, 0.90),
        "pipedream": (0.97, 0.93, 0.95),
    }
    return [
        seeded(tmp_path, method, seed, accuracy)
        for method, of_seeds in scores.items()
        for seed, accuracy in enumerate(of_seeds)
    ]


# ---------------------------------------------------------------------------- configurations


def test_runs_that_differ_by_their_seed_alone_are_one_configuration(runs: list[Run]) -> None:
    cases = cases_of(facts_of(runs))
    assert [len(case.runs) for case in cases] == [3, 3, 3]
    assert [case.label for case in cases][1:] == [
        "stale-weights, 4 stages",
        "pipedream, 4 stages",
    ]
    text = page(runs)
    assert [one["label"] for one in data_of(text)["curves"]] == [case.label for case in cases]
    assert text.count('<table class="cases">') == 1


def test_configurations_of_one_method_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    several = [seeded(tmp_path, "adl", s, 0.9, lr=0.1) for s in (0, 1)]
    several += [seeded(tmp_path, "adl", s, 0.9, lr=0.2, momentum=0.5) for s in (0, 1)]
    first, second = (case.label for case in cases_of(facts_of(several)))
    assert "lr=0.1" in first and "lr=0.2" in second and "momentum=0.5" in second


def test_a_curve_is_a_mean_with_the_lowest_and_the_highest(tmp_path: Path) -> None:
    long = [Point(1.0, 1.0, 0.5), Point(2.0, 2.0, 0.7), Point(3.0, 3.0, 0.8)]
    short = [Point(1.0, 3.0, 0.7), Point(2.0, 4.0, 0.9)]
    curve = Curve.of([long, short])
    assert [point.value for point in curve.points] == pytest.approx([0.6, 0.8, 0.8])
    assert [point.time_s for point in curve.points] == [2.0, 3.0, 3.0]
    assert (curve.low, curve.high) == ([0.5, 0.7, 0.8], [0.7, 0.9, 0.8])
    assert curve.runs == [2, 2, 1]


# ---------------------------------------------------------------------------- gaps


def test_gaps_are_those_of_pairs_with_the_interval_of_their_mean(runs: list[Run]) -> None:
    facts = facts_of(runs)
    cases = cases_of(facts)
    comparison = Comparison(facts, cases)
    plain, stale, pipedream = map(comparison.standing, cases)
    assert plain.baseline and not plain.gaps
    assert stale.gaps == pytest.approx([-0.04] * 3) and stale.half == pytest.approx(0, abs=1e-9)
    assert pipedream.gaps == pytest.approx([0.02, -0.03, 0.01])
    # 4.303 is Student's t of two degrees of freedom; the deviation of these three is 0.02646.
    assert pipedream.half == pytest.approx(4.303 * 0.0264575 / math.sqrt(3), rel=1e-4)
    words = Seen(page(runs)).words
    assert (
        "stale-weights, 4 stages ends 4.0 points below it (-4.0 to -4.0 at 95 %, 3 seeds):"
        " a loss beyond chance."
    ) in words
    assert (
        "pipedream, 4 stages ends level with it (-6.6 to +6.6 at 95 %, 3 seeds):"
        " these seeds cannot tell the two apart."
    ) in words


def test_a_seed_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    """Two runs of one seed have the same bits: as two pairs they would be sure of anything."""
    plain = seeded(tmp_path, "synchronous", 0, 0.95)
    late = seeded(tmp_path, "adl", 0, 0.9)
    facts = facts_of([plain, late, late])
    standing = Comparison(facts, cases := cases_of(facts)).standing(cases[1])
    assert len(standing.gaps) == 1 and standing.half is None
    assert "one pair of seeds, which says little" in Seen(page([plain, late, late])).words


def test_a_run_that_goes_on_does_not_count_beside_finished_ones(runs: list[Run]) -> None:
    """Its score is that of its latest evaluation: it once made a loss of 3 points one of 10."""
    late = runs[3]
    (late.folder / SUMMARY).unlink()
    lines = (late.folder / METRICS).read_text().splitlines()
    (late.folder / METRICS).write_text("\n".join(lines[:25]) + "\n")
    facts = facts_of([*runs[:3], Run.load(late.folder), *runs[4:]])
    standing = Comparison(facts, cases := cases_of(facts)).standing(cases[1])
    assert standing.gaps == pytest.approx([-0.04, -0.04])
    said = Seen(page([run.run for run in facts])).words
    assert "ends 4.0 points below it (two pairs of seeds, which say little)." in said


def test_means_of_different_seeds_have_no_interval(tmp_path: Path) -> None:
    plain = [seeded(tmp_path, "synchronous", s, 0.95) for s in (0, 1)]
    late = [seeded(tmp_path, "adl", s, 0.9) for s in (2, 3)]
    facts = facts_of([*plain, *late])
    standing = Comparison(facts, cases := cases_of(facts)).standing(cases[1])
    assert standing.mean == pytest.approx(-0.05) and standing.half is None
    assert "no pairs of the same seed" in Seen(page([*plain, *late])).words


# ---------------------------------------------------------------------------- the front


def test_the_front_is_the_best_that_anybody_had_reached_by_then(tmp_path: Path) -> None:
    """Evaluations at 10, 20 and 30 s; the other one at half of these times reaches less."""
    high = made_run(tmp_path / "high", accuracy=0.9)
    low = made_run(tmp_path / "low", "adl", accuracy=0.6)
    for line in low.metrics:
        line["time_s"] /= 2
    front = Front.of(cases_of(facts_of([high, low])))
    assert front is not None
    reached = [(t, round(value, 3), place) for t, value, place in front.steps]
    assert reached == [(5, 0.2, 1), (10, 0.4, 1), (15, 0.6, 1), (30, 0.9, 0)]
    assert front.holders() == [(5, 1), (30, 0)]
    text = page([high, low])
    assert "Best accuracy by time: low from 5 s; high from 30 s." in Seen(text).words.replace(
        "\xa0", " "
    )
    assert data_of(text)["front"] == {"key": "test_accuracy"}
    assert data_of(page([high]))["front"] is None


def test_times_that_are_no_comparison_are_said_to_be_none(tmp_path: Path) -> None:
    plain = made_run(tmp_path / "a", config={"threads": 1, "processes": 4})
    other = made_run(tmp_path / "b", "adl", config={"threads": 2, "processes": 4})
    assert "their times are no comparison" in Seen(page([plain, other])).words
    alone = made_run(tmp_path / "c", "dsp", config={"threads": 1, "processes": 1})
    assert "what the simulation took" in Seen(page([plain, alone])).words


# ---------------------------------------------------------------------------- stages, stragglers


def sized(run: Run, *parameters: int) -> Run:
    memory = [{"parameters": count, "layers": 2} for count in parameters]
    return changed(run, SUMMARY, memory=memory)


def test_stages_have_layers_parameters_and_their_share_of_stale_weights(tmp_path: Path) -> None:
    run = sized(made_run(tmp_path / "run"), 100, 200, 300, 400)
    (facts,) = facts_of([run])
    assert facts.stale_share == pytest.approx(0.6)  # the last stage does not lag
    words = Seen(page([run])).words
    assert "60.0 % of the weights are stale: they are in stages that lag." in words
    assert "stage 1220020.0 %420.0 %91.7 %" in words  # 2 layers, 200 weights, lag 4, all but 1 late
    assert "model81,000100.0 %60.0 %" in words
    bare = Seen(page([made_run(tmp_path / "older")])).words
    assert "does not say how large its stages are" in bare


def test_the_straggler_is_named_with_its_price(tmp_path: Path) -> None:
    """Of 7, 1, 1 and 1 parts of the work the first stage takes 2.8 times the mean."""
    run = made_run(tmp_path / "run", share=(7, 1, 1, 1))
    pace = Pace.of(run.ledger())
    assert pace is not None and pace.slowest == (0, 0)
    assert pace.excess == pytest.approx(1.8)
    words = Seen(page([run])).words
    assert "Stage 0 is the straggler: a batch takes it 84 ms, the mean stage 30 ms." in words
    assert "costs 180.0 % of the time that equal stages would need. Cut elsewhere" in words
    even = Seen(page([made_run(tmp_path / "even")])).words
    assert "No stage holds the others up" in even and "is the straggler" not in even


def test_a_slow_replica_is_told_from_a_bad_cut(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", replicas=2)
    slowed = Ledger(
        e._replace(end_s=e.start_s + 3 * (e.end_s - e.start_s))
        if (e.replica, e.stage) == (1, 2)
        else e
        for e in run.ledger() or ()
    )
    slowed.save(run.folder / "ledger.jsonl")
    words = Seen(page([run])).words
    assert "R1 stage 2 is the straggler" in words
    assert "The same stage is faster in other replicas: look at its machine." in words


def test_measured_lags_beyond_the_declared_ones_are_the_verdict(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    assert "every measured lag was within them." in Seen(page([run])).words
    late = changed(run, SUMMARY, lags={"0": {"7": 3, "6": 40}})
    assert "stage 0 was 7 late, declared 6." in Seen(page([late])).words


# ---------------------------------------------------------------------------- many runs, folded


def test_eighteen_runs_are_folded(tmp_path: Path) -> None:
    methods = ("synchronous", "stale-weights", "pipedream", "adl", "dsp", "fdg")
    many = [seeded(tmp_path, m, s, 0.9) for m in methods for s in range(3)]
    seen = Seen(page(many))
    assert "details" in seen.tags and ("open", None) not in seen.attributes
    few = Seen(page(many[:2]))
    assert ("open", None) in few.attributes


# ---------------------------------------------------------------------------- runs that go on


def going_on(folder: Path) -> tuple[Run, Lock]:
    run = made_run(folder)
    (run.folder / SUMMARY).unlink()
    lines = (run.folder / METRICS).read_text().splitlines()
    (run.folder / METRICS).write_text("\n".join(lines[:30]) + "\n")
    lock = Lock(run.folder)
    lock.take([this_process()])
    return Run.load(run.folder), lock


def test_a_run_whose_process_lives_is_still_running(tmp_path: Path) -> None:
    run, lock = going_on(tmp_path / "run")
    assert "updates; still running after 29 steps" in Seen(page([run])).words
    lock.release()
    words = Seen(page([Run.load(run.folder)])).words
    assert "it was killed, or is still running after 29 steps" in words
    (run.folder / ".lock").write_text('{"processes": [3]}')  # by a hand
    assert page([Run.load(run.folder)])


def test_following_writes_the_page_anew_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lock = going_on(tmp_path / "run")
    file = run.folder / "report" / "report.html"
    refreshes = []

    def sleep(_: float) -> None:
        refreshes.append(data_of(file.read_text())["refresh"])
        if len(refreshes) == 2:
            lock.release()

    monkeypatch.setattr("offbeat.app.cli.report.time.sleep", sleep)
    with pytest.raises(SystemExit):
        main(["report", str(run.folder), "--follow", "--json"])
    assert refreshes == [5, 5]
    assert data_of(file.read_text())["refresh"] is None
    assert json.loads(capsys.readouterr().out)["written"][0] == str(file)


# ---------------------------------------------------------------------------- the trace


def test_an_arrow_of_the_trace_leads_from_every_forward_to_its_backward() -> None:
    ledger = made_ledger(StaleWeights(), 12)
    events = ledger.chrome_trace()["traceEvents"]
    leaves = {e["id"]: e for e in events if e["ph"] == "s"}
    arrives = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(leaves) == len(arrives) == 12 * STAGES and leaves.keys() == arrives.keys()
    assert leaves["0/0/7"]["name"] == arrives["0/0/7"]["name"] == "F7 to B7: 6 updates late"
    boxes = {(e["name"], e["tid"]): e for e in events if e["ph"] == "X"}
    for key, event in (("F7", leaves["0/0/7"]), ("B7", arrives["0/0/7"])):
        box = boxes[key, 0]
        assert box["ts"] < event["ts"] < box["ts"] + box["dur"]
        assert box["args"]["lag"] == 6
