"""The command line as a whole: lists, help in groups, JSON, tuples, loggers, the live view."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.app.cli import app, main
from offbeat.app.cli.live import Screen
from offbeat.app.cli.printing import print_columns
from offbeat.app.experiment import Experiment
from offbeat.averaging import AVERAGINGS
from offbeat.registry import Choice
from offbeat.zoo.data.sets import DATA
from offbeat.zoo.networks import NETWORKS

Capture = pytest.CaptureFixture[str]
SHORT = ["--epochs", "1", "--max-steps", "12", "--lr", "0.02"]


def said(capsys: Capture, *words: str, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as left:
        main(words)
    caught = capsys.readouterr()
    assert int(left.value.code or 0) == code, caught.err
    return caught.out, caught.err


# ---------------------------------------------------------------------------- lists


@pytest.mark.parametrize("command", ["methods", "corrections", "averagings", "models", "data"])
def test_lists_fit_eighty_columns(capsys: Capture, command: str) -> None:
    out, _ = said(capsys, command)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("averagings", [kind.name for kind in AVERAGINGS]),
        ("models", list(NETWORKS)),
        ("data", list(DATA)),
    ],
)
def test_lists_name_everything_in_json(capsys: Capture, command: str, names: list[str]) -> None:
    rows = json.loads(said(capsys, command, "--json")[0])
    assert [row["name"] for row in rows] == names
    assert all(row["about"] and {*row["required"]} <= {*row["settings"]} for row in rows)


def test_what_must_be_given_is_told_from_what_may_be_none(capsys: Capture) -> None:
    rows = {row["name"]: row for row in json.loads(said(capsys, "averagings", "--json")[0])}
    assert rows["dasgd"]["required"] == ["every", "delay"]
    assert rows["dasgd"]["settings"]["progress"] is None
    assert "every=..." in said(capsys, "averagings")[0]


def test_a_cell_that_does_not_fit_goes_on_below(capsys: Capture) -> None:
    print_columns([["name", "words"], ["a-long-name", "many " * 30], ["b", ""]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith(" " * 13 + "many") and lines[-1] == "b"


# ---------------------------------------------------------------------------- help


def test_help_is_in_groups(capsys: Capture) -> None:
    out, _ = said(capsys, "--help")
    headings = [line for line in out.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Options:", "Train:", "Look at what happened:", "Look ahead:",
        "What there is to choose from:",
    ]  # fmt: skip
    assert "..." not in out.replace("[ARGS]...", "")
    train, _ = said(capsys, "train", "--help")
    assert (
        train.index("Method:") < train.index("--correction") < train.index("Stages and replicas:")
    )
    assert train.index("Machine:") < train.index("--device")
    for setting in Experiment.__dataclass_fields__:
        assert f"--{setting.replace('_', '-')}" in train


def test_every_command_takes_json() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        assert "as_json" in command.callback.__annotations__, command.callback.__name__


# ---------------------------------------------------------------------------- JSON


def test_train_verify_and_report_answer_in_json(capsys: Capture, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    out, err = said(
        capsys, "train", *SHORT, "--method", "auto", "--stages", "2", "--out", folder, "--json"
    )
    summary = json.loads(out)  # nothing stands beside it, not even what "auto" says
    assert summary["folder"] == folder and summary["status"] == "finished"
    assert f"stored in {folder}" in err
    findings = json.loads(said(capsys, "verify", folder, "--json")[0])
    assert findings and all(finding["holds"] for finding in findings)
    written = json.loads(said(capsys, "report", folder, "--json")[0])["written"]
    assert Path(written[0]).name == "report.html" and all(Path(path).exists() for path in written)
    again = json.loads(said(capsys, "train", "--resume", "--out", folder, "--json")[0])
    assert again["status"] == "finished"


def test_a_study_answers_in_json(capsys: Capture, tmp_path: Path) -> None:
    words = ["--methods", "pipedream", "--stage-counts", "2", "--seeds", "1"]
    out, _ = said(capsys, "study", *SHORT, *words, "--out", str(tmp_path / "study"), "--json")
    told = json.loads(out)
    assert told["score"] == "accuracy"
    assert [cell["method"] for cell in told["cells"]] == ["synchronous", "pipedream"]
    assert told["cells"][1]["gap"] == pytest.approx(told["cells"][1]["gaps"][0])


# ---------------------------------------------------------------------------- tuples


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("mlp:hidden=64,32", {"hidden": (64, 32)}),
        ("mlp:hidden=64,", {"hidden": (64,)}),
        ("mlp:hidden=64,32,classes=3", {"hidden": (64, 32), "classes": 3}),
        ("dsp:hop=2,1,lag=6,2,0", {"hop": (2, 1), "lag": (6, 2, 0)}),
        ("mlp:hidden=(64,32)", {"hidden": (64, 32)}),
        ("adl:accumulate=4", {"accumulate": 4}),
    ],
)
def test_tuples_need_no_brackets(text: str, settings: dict[str, Any]) -> None:
    choice = Choice.read(text, "--model")
    assert choice.settings == settings
    assert Choice.read(str(choice), "--model") == choice
    assert not {*"() '\""} & {*str(choice)}, "a shell needs no quotes"


# ---------------------------------------------------------------------------- loggers

LOGGER = """
class Kept:
    seen = []
    def begin(self, config):
        self.seen.append(("begin", config["lr"]))
    def log(self, numbers, step):
        self.seen.append((step, sorted(numbers)))
    def end(self, status):
        self.seen.append(("end", status))
class Half:
    def begin(self, config): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "kept_here.py").write_text(LOGGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "kept_here", raising=False)
    return "kept_here"


def test_a_logger_is_told_the_beginning_the_numbers_and_the_end(
    capsys: Capture, module: str, tmp_path: Path
) -> None:
    said(capsys, "train", *SHORT, "--logger", f"{module}:Kept", "--out", str(tmp_path / "run"))
    seen = sys.modules[module].Kept.seen
    assert seen == [
        ("begin", 0.02),
        (10, ["train/learning_rate", "train/loss", "train/rows_per_s"]),
        (12, ["test/accuracy", "test/loss"]),
        ("end", "finished"),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kept_here", "give a module and a class, as in tracking:WandB"),
        ("nowhere_at_all:X", "No module named 'nowhere_at_all'. The module is looked for in"),
        ("kept_here:Keep", "Give a class that kept_here has."),
        ("kept_here:Half", "it has no log and no end. A logger has begin(config)"),
    ],
)
def test_a_logger_that_cannot_be_used_is_answered_before_training(
    capsys: Capture, module: str, tmp_path: Path, name: str, words: str
) -> None:
    _, err = said(capsys, "train", *SHORT, "--logger", name, "--out", str(tmp_path / "run"), code=2)
    assert words in err and not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------- the live view


def test_the_live_view_says_what_takes_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    states: list[str] = []
    before = Screen.now

    def now(self: Screen, what: str) -> None:
        states.append(what)
        before(self, what)

    monkeypatch.setattr(Screen, "now", now)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    out, _ = said(capsys, "train", *SHORT, "--out", str(tmp_path / "run"))
    assert states == [
        "loading digits",
        "training",
        "evaluating",
        "training",
        "storing what came out",
    ]
    assert "loading digits ..." in out and "evaluating" in out
