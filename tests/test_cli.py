"""The command line: its words, its numbers, its JSON and its errors."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from offbeat.app.cli import main
from offbeat.methods import METHODS, Method, method_named
from offbeat.schedules.schedule import Schedule
from offbeat.schedules.table import Table, parse_actions

Run = Callable[[str], tuple[int, str, str]]
Answer = Callable[[str], Any]

NAMES = [method.name for method in METHODS]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process: exit code, stdout, stderr."""

    def call(line: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(line.split())
        caught = capsys.readouterr()
        return int(left.value.code or 0), caught.out, caught.err

    return call


@pytest.fixture
def answer(run: Run) -> Answer:
    """The JSON that a command line prints."""

    def call(line: str) -> Any:
        code, out, err = run(f"{line} --json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


def process(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, check=False
    )


# Words a person can check by hand

# Stage 0 holds 4 batches, so it forwards all four before its first backward; stage 1 holds 2; the
# last stage turns each batch round at once. A batch needs one tick per stage each way.
STALE_WEIGHTS_3_4 = """\
tick       0  1  2  3  4  5  6  7  8  9 10 11
stage 0   F0 F1 F2 F3  . B0  . B1  . B2  . B3
stage 1    . F0 F1 F2 B0 F3 B1  . B2  . B3  .
stage 2    .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

stage 0: fill 0F0 0F1 0F2 0F3 | cycle 0F4 0B0 0U0 | drain 0B1 0U1 0B2 0U2 0B3 0U3 0B4 0U4
stage 1: fill 1F0 1F1 | cycle 1F2 1B0 1U0 | drain 1B1 1U1 1B2 1U2
stage 2: fill - | cycle 2F0 2B0 2U0 | drain -

lag per stage: 4 2 0
"""

# Forward 1 is 3 columns, backward 2 is 6. A batch goes up and down alone: stage 0 at columns 0 and
# 12, stage 1 at 3 and 6, and the next batch starts at 18.
SYNCHRONOUS_2_2 = """\
stage 0  F0          B0=== F1          B1===
stage 1     F0 B0===          F1 B1===

time per batch  6
busy share      50.0%
speed-up        1.00 over one device
"""


def test_schedule_prints_grid_text_and_lags(run: Run) -> None:
    assert run("schedule stale-weights --stages 3 --batches 4") == (0, STALE_WEIGHTS_3_4, "")


def test_timeline_prints_picture_and_readings(run: Run) -> None:
    line = "timeline synchronous --stages 2 --batches 2 --width 80"
    assert run(line) == (0, SYNCHRONOUS_2_2, "")


def test_schedule_counts_micro_batches_only_where_there_are_some(run: Run) -> None:
    assert "micro-batches per batch: 3" in run("schedule gpipe:micro_batches=3")[1]
    assert "micro-batches" not in run("schedule pipedream")[1]


def test_methods_lists_every_method_and_explains_its_letters(run: Run) -> None:
    code, out, err = run("methods")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["name", "lag", "copies", "backward", "waits", "for", "reference"]
    begins = [line.split()[0] for line in lines[1 : lines.index("")] if line[0] != " "]
    assert begins == NAMES
    first = next(k for k, line in enumerate(lines) if line.startswith("stale-weights "))
    assert "2(K-1-k)" in lines[first]
    assert "1912.12675" in " ".join(lines[first : first + 4])
    notes = "\n".join(lines[lines.index("") :])
    assert all(letter in notes for letter in ("k = 0", " K;", "M micro-batches"))


def test_methods_keeps_names_whole_on_a_narrow_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    lines = run("methods")[1].splitlines()
    assert max(map(len, lines)) <= 82
    assert {line.split(" ")[0] for line in lines} >= set(NAMES)


# JSON


def test_methods_json_rebuilds_every_method(answer: Answer) -> None:
    rows = answer("methods")
    rebuilt = [method_named(row["name"], **row["settings"]) for row in rows]
    assert rebuilt == [method() for method in METHODS]
    for row, method in zip(rows, METHODS, strict=True):
        assert row["lag"] == method.lag_formula
        assert row["weight_copies"] == method.copies
        assert row["waits_for"] == method.waits_for
        assert row["reference"] == method.reference
    backward = {row["name"]: row["backward"] for row in rows}
    assert backward["stale-weights"] == "current"
    assert backward["dsp"] == "recompute"
    assert backward["gpipe"] is None


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_json_table_reads_back_as_the_table_that_runs(
    answer: Answer, method: type[Method], stages: int
) -> None:
    found = answer(f"schedule {method.name} --stages {stages} --batches 5")
    plan = method().schedule(stages)
    flags = ["lockstep"] * found["lockstep"] + ["local losses"] * found["local_losses"]
    rows = [" | ".join(" ".join(row) for row in of_stage) for of_stage in found["table"]]
    text = "\n".join([f"# {', '.join(flags)}", *rows])
    assert Table.parse(text) == plan.table(5)
    assert Schedule.parse(found["schedule"]) == plan
    assert tuple(found["lags"]) == method().lags(stages)
    assert (found["stages"], found["batches"]) == (stages, 5)
    assert found["micro_batches"] == plan.micro_batches


@pytest.mark.parametrize("name", NAMES)
def test_json_spans_hold_every_action_once_and_in_order(answer: Answer, name: str) -> None:
    found = answer(f"timeline {name} --stages 3 --batches 4")
    table = method_named(name).schedule(3).table(4)
    spans = [(parse_actions(s["action"])[0], s["start"], s["end"]) for s in found["spans"]]
    for stage in range(3):
        mine = [span for span in spans if span[0].stage == stage]
        assert tuple(span[0] for span in mine) == table.order(stage)
        assert all(now[2] <= later[1] for now, later in pairwise(mine))
    assert found["duration"] == max(end for _, _, end in spans)


# Numbers with closed forms


@pytest.mark.parametrize(("chunks", "stages"), [(1, 1), (1, 3), (4, 1), (4, 4), (8, 3)])
def test_busy_share_of_gpipe_is_the_formula(answer: Answer, chunks: int, stages: int) -> None:
    found = answer(f"timeline gpipe:micro_batches={chunks} --stages {stages}")
    assert found["busy_share"] == pytest.approx(chunks / (chunks + stages - 1))


def test_every_cost_option_reaches_the_model(answer: Answer) -> None:
    def speed_up(line: str) -> float:
        return float(answer(f"timeline {line}")["speed_up"])

    # DDG: the forward passes all K stages, the backwards run side by side.
    assert speed_up("ddg --forward 3 --backward 5") == pytest.approx(4 * 8 / (4 * 3 + 5))
    # Synchronous: K-1 messages each way.
    assert speed_up("synchronous --hop 0.5") == pytest.approx(12 / (12 + 6 * 0.5))
    # DSP recomputes at every stage but the last.
    assert speed_up("dsp --recompute 3") == pytest.approx(12 / 6)
    # PipeDream: the dearest stage sets the pace, 4/3 of a stage here.
    assert speed_up("pipedream --stages 2 --share 2,1") == pytest.approx(6 / 4)


def test_defaults_are_four_stages_eight_batches_and_costs_1_1_2_0(answer: Answer) -> None:
    found = answer("timeline pipedream")
    costs = {"forward": 1.0, "recompute": 1.0, "backward": 2.0, "hop": 0.0, "share": []}
    assert (found["stages"], found["batches"], found["costs"]) == (4, 8, costs)


# Names and settings


@pytest.mark.parametrize("command", ["schedule", "timeline"])
@pytest.mark.parametrize("name", NAMES)
def test_names_work_in_any_case(answer: Answer, command: str, name: str) -> None:
    plain = answer(f"{command} {name} --stages 2 --batches 2")
    assert plain["method"] == name
    for spelled in (name.upper(), name.title()):
        assert answer(f"{command} {spelled} --stages 2 --batches 2") == plain


@pytest.mark.parametrize("command", ["schedule", "timeline"])
@pytest.mark.parametrize(
    ("options", "setting", "value"),
    [
        ("adl:accumulate=2", "accumulate", 2),
        ("gpipe:micro_batches=3", "micro_batches", 3),
        ("fdg:beta=0.5", "beta", 0.5),
        ("dsp:hop=2", "hop", 2),
        ("dsp:hop=(2,1)", "hop", [2, 1]),
        ("adl:reduction=sum", "reduction", "sum"),
        ("DSP:lag=(4,2,0)", "lag", [4, 2, 0]),
        ("pipedream:backward=recompute", "backward", "recompute"),
    ],
)
def test_a_setting_is_set_and_no_other(
    answer: Answer, command: str, options: str, setting: str, value: object
) -> None:
    name = options.split()[0].partition(":")[0]
    untouched = answer(f"{command} {name} --stages 3")["settings"]
    assert answer(f"{command} {options} --stages 3")["settings"] == untouched | {setting: value}


def test_settings_change_the_lags(answer: Answer) -> None:
    assert answer("schedule adl:accumulate=2 --stages 3")["lags"] == [2, 1, 0]
    assert answer("schedule dsp:hop=(2,1) --stages 3")["lags"] == [6, 2, 0]
    assert answer("schedule dsp:lag=(5,1,1) --stages 3")["lags"] == [5, 1, 1]
    assert answer("schedule pipedream-2bw --stages 3")["micro_batches"] == 3


# Width


def test_picture_keeps_to_the_width_and_says_that_it_was_cut(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picture(line: str) -> list[str]:
        return run(line)[1].split("\n\n")[0].splitlines()

    monkeypatch.setenv("COLUMNS", "60")
    for line, width in (("timeline gpipe", 60), ("timeline gpipe --width 40", 40)):
        *stages, note = picture(line)
        assert max(map(len, stages)) == width
        assert note == f"... cut at {width} columns; --width {2 * width} shows more"
    assert not any("cut" in line for line in picture("timeline gpipe --batches 1 --width 200"))


# Mistakes

MISTAKES = [
    ("schedule auto", "method 'auto' stands for one that is chosen for a model"),
    ("schedule pipedraem", "unknown method 'pipedraem'. Did you mean 'pipedream'?"),
    ("timeline Stale-Wieghts", "Did you mean 'stale-weights'?"),
    ("schedule zzz", "Known: synchronous, gpipe, 1f1b,"),
    ("schedule ddg --stages 0", "--stages '0': give a whole number from 1 to 256."),
    ("timeline ddg --stages -3", "--stages '-3': give a whole number from 1 to 256."),
    ("schedule ddg --stages 1000000", "--stages '1000000': give a whole number"),
    ("schedule ddg --stages two", "--stages 'two': give a whole number"),
    ("timeline ddg --stages 2.5", "--stages '2.5': give a whole number"),
    ("schedule ddg --batches 0", "--batches '0': give a whole number from 1 to 10000."),
    ("timeline ddg --batches=", "--batches '': give a whole number"),
    ("timeline ddg --width 3", "--width '3': give a whole number from 20"),
    ("timeline ddg --forward fast", "--forward 'fast': give a number, as in --forward 2."),
    ("timeline ddg --hop inf", "--hop 'inf': give a number"),
    ("timeline ddg --recompute -1", "recompute=-1.0: a cost is a number of at least 0."),
    ("timeline ddg --forward 0 --backward 0", "give one of them a cost"),
    (
        "timeline ddg --backward stash",
        "which weights it sees is a setting of the method, as in ddg:backward=stash",
    ),
    ("timeline ddg --share 1,x,1,1", "--share '1,x,1,1': give a number per stage"),
    ("timeline ddg --share 1,1", "share has 2 entries for 4 stages: give one per stage."),
    ("timeline ddg --share 1,0,1,1", "give positive numbers"),
    ("schedule adl:accumulate=0", "accumulate=0: give a whole number of at least 1."),
    ("schedule gpipe:micro_batches=x", "micro_batches='x': give a whole number of at least 1."),
    ("schedule ddg:backward=stsh", "unknown backward rule 'stsh'. Did you mean 'stash'?"),
    ("schedule fdg:beta=x", "FDG(beta='x'): gradients shrink by beta, so 0 < beta <= 1"),
    ("schedule fdg:beta=2", "0 < beta <= 1"),
    (
        "schedule dsp:lag=4;2",
        "DSP(lag='4;2'): give integers from 0 to 10000 in a tuple, as",
    ),
    ("schedule dsp:lag=(0,2,4,6)", "Try lag=(6, 4, 2, 0)."),
    ("schedule dsp:lag=(2,0)", "give one per stage, for example lag=(6, 4, 2, 0)."),
    ("schedule dsp:hop=(1,)", "DSP(hop=(1,)) has 1 entries for 4 stages: give one per hop"),
    ("timeline dsp:hop=(1,1)", "give one per hop between neighbours, 3 of them."),
    ("schedule pipedream-2bw:accumulate=2", "Give accumulate >= 4, or leave it out."),
    ("schedule gpipe:accumulate=2", "gpipe has no setting 'accumulate': it takes micro_batches."),
    ("timeline synchronous:beta=1", "synchronous has no setting 'beta': it takes no settings."),
    ("schedule adl:accumulate", "settings read name=value, separated by commas"),
    ("timeline adl:accumulate=0", "accumulate=0: give a whole number of at least 1."),
    ("timeline adl:acc=2", "adl has no setting 'acc': it takes backward, accumulate, cap, reduct"),
]


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_gets_one_message_and_exit_code_2(run: Run, line: str, words: str) -> None:
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("schedule", "Missing argument 'METHOD'."),
        ("schedul gpipe", "Did you mean 'schedule'?"),
        ("timeline gpipe --stage 3", "--stages"),
        ("schedule ddg --backward stash", "--backward"),
        ("schedule gpipe twice", "twice"),
        ("timeline gpipe --stages", "--stages"),
    ],
)
def test_a_misspelt_command_line_points_to_the_help(run: Run, line: str, words: str) -> None:
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("Error: ") == 1


# Whole processes


@pytest.mark.parametrize(
    "line", ["--help", "methods", "schedule adl", "timeline dsp", "timeline dsp --json"]
)
def test_no_command_imports_torch(line: str) -> None:
    code = (
        "import sys\nfrom offbeat.app.cli import main\n"
        f"try: main({line.split()!r})\nexcept SystemExit as left: assert not left.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = process("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_module_and_script_are_the_same_program() -> None:
    done = process("-m", "offbeat", "schedule", "stale-weights", "--stages", "3", "--batches", "4")
    assert (done.returncode, done.stdout, done.stderr) == (0, STALE_WEIGHTS_3_4, "")
    usage = process("-m", "offbeat", "timeline", "--help").stdout
    assert usage.startswith("Usage: offbeat timeline [OPTIONS]")


def test_a_mistake_in_a_process_is_no_traceback() -> None:
    done = process("-m", "offbeat", "timeline", "gpipe:accumulate=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: gpipe has no setting 'accumulate': it takes micro_batches.\n"


@pytest.mark.parametrize("words", [["methods"], ["schedule", "adl"], ["timeline", "adl", "--json"]])
def test_a_closed_pipe_ends_quietly(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == b""
