"""Random input: a success, or an error of ours in words; nothing else ever comes out.

``OFFBEAT_FUZZ=20 pytest tests/test_fuzz.py`` tries twenty times as many.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.faults import fuzz
from benchmarks.stored import read_rows
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import offbeat
from helpers import mlp, trainer_for, vector_batches
from offbeat.app import cli
from offbeat.app.experiment import Experiment
from offbeat.app.runs import Run
from offbeat.averaging import AVERAGINGS
from offbeat.errors import OffbeatError
from offbeat.guards import Guards
from offbeat.methods import METHODS
from offbeat.records.ledger import Ledger
from offbeat.schedules.schedule import Schedule
from offbeat.schedules.table import Table
from offbeat.schedules.timeline import measured_timeline

LONGER = int(os.environ.get("OFFBEAT_FUZZ", "1"))


def tries(count: int) -> settings:
    return settings(
        max_examples=count * LONGER,
        deadline=None,
        derandomize=LONGER == 1,  # the same examples every time, unless somebody goes looking
        database=None,
        suppress_health_check=list(HealthCheck),
    )


whole = st.integers(-2, 6) | st.sampled_from([0, 1, 2, 3, 10**6, -(10**18), 2**63, 2**70])
numbers = whole | st.floats() | st.sampled_from([0.5, 1.0, math.nan, math.inf])
words = st.text(max_size=8) | st.sampled_from(["none", "stash", "current", "recompute", "skip"])
plain = st.none() | st.booleans() | numbers | words
anything = plain | st.lists(plain, max_size=4) | st.lists(whole, max_size=3).map(tuple)
likely = st.integers(1, 4)


def settings_of(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of a dataclass's settings, mostly sensible."""
    values = likely | likely | st.sampled_from(["stash", "current", "recompute"]) | anything
    names = st.lists(st.sampled_from([f.name for f in fields(kind)] or [""]), max_size=3)
    needed = [f.name for f in fields(kind) if f.default is MISSING]
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({n: values for n in [*chosen, *needed] if n})
    )


@contextlib.contextmanager
def only_our_errors() -> Any:
    """Lets through what a user may meet, provided that it says something."""
    try:
        yield
    except OffbeatError as error:
        said = str(error)
        assert len(said) > 20, said
        assert "object at 0x" not in said, said


# ------------------------------------------------------------------------- trainers


@st.composite
def objects(draw: Any, kinds: Any) -> Any:
    """A method or an averaging, or the settings that refuse to make one."""
    kind = draw(st.sampled_from(kinds))
    return kind, draw(settings_of(kind))


CUTS = st.lists(st.integers(0, 7) | anything, max_size=3)


@st.composite
def configurations(draw: Any) -> dict[str, Any]:
    optional = {
        "stages": likely | anything,
        "cuts": CUTS | anything,
        "ppv": CUTS | anything,
        "replicas": likely | anything,
        "clip": st.floats(0.1, 2) | anything,
        "seed": whole,
        "autocast": st.sampled_from([torch.float16, None]),
        "engine": st.sampled_from(["serial", "processes", None, 3]),
        "timeout": numbers,
        "guards": settings_of(Guards),
    }
    chosen = draw(st.sets(st.sampled_from(list(optional)), max_size=3))
    return {name: draw(optional[name]) for name in sorted(chosen)}


@tries(120)
@given(objects(METHODS), objects(AVERAGINGS) | st.none(), configurations(), st.integers(1, 9))
def test_any_trainer_trains_or_says_why_not(
    method: Any, averaging: Any, options: dict[str, Any], rows: int
) -> None:
    batches = vector_batches(4, rows=rows, dtype=torch.float32)
    with only_our_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if averaging is not None:
            options["averaging"] = averaging[0](**averaging[1])
        if "guards" in options:
            options["guards"] = Guards(**options["guards"])
        trainer = trainer_for(mlp(dtype=torch.float32), method[0](**method[1]), **options)
        for x, y in batches:
            trainer.step(x, y)
        trainer.flush()
        assert math.isfinite(trainer.evaluate(batches).loss)
        assert all(value.isfinite().all() for value in trainer.state_dict().values())
        for stage, lag in enumerate(trainer.lags):
            assert max(trainer.ledger.lags(stage).values()) <= lag


BATCHES: st.SearchStrategy[Any] = st.one_of(
    st.builds(torch.randn, st.integers(0, 4), st.sampled_from([6, 5])),
    st.builds(torch.zeros, st.integers(0, 4), dtype=st.sampled_from([torch.int64, torch.bool])),
    st.builds(torch.tensor, st.floats()),
    st.lists(st.builds(torch.ones, st.integers(1, 3)), max_size=2),
    anything,
)


@tries(60)
@given(BATCHES, BATCHES, st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_a_batch_that_is_refused_leaves_the_run_as_it_was(
    x: Any, y: Any, replicas: int, accumulate: int
) -> None:
    """What the model itself raises is the user's; what the trainer refuses it has not started."""
    method = offbeat.StaleWeights(accumulate=accumulate)
    trainer = trainer_for(mlp(dtype=torch.float32), method, cuts=[4], replicas=replicas)
    good = vector_batches(1, rows=4, dtype=torch.float32)[0]
    trainer.step(*good)
    try:
        trainer.step(x, y)
    except offbeat.errors.BatchError:
        trainer.step(*good)
        trainer.flush()
    except Exception as error:
        notes = "".join(getattr(error, "__notes__", []))
        if not isinstance(error, OffbeatError) and "this happened at" not in notes:
            raise
        with pytest.raises(offbeat.errors.StoppedError):
            trainer.step(*good)


# ------------------------------------------------------------------------- the command line


def run_cli(*arguments: str) -> tuple[int, str]:
    """Exit code and what was said; any exception but the exit itself fails the test."""
    said, shown = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(shown),
        warnings.catch_warnings(action="ignore"),
    ):
        try:
            cli.main(list(arguments))
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    return int(code), said.getvalue()


def assert_answered(*arguments: str) -> int:
    code, said = run_cli(*arguments)
    assert code in (0, 2), (arguments, code, said)
    assert code == 0 or len(said) > 20, (arguments, said)
    assert "Traceback" not in said
    return code


NAMES = st.sampled_from([kind.name for kind in METHODS])
printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
values = (
    st.integers(-1, 9).map(str)
    | st.lists(st.integers(-1, 5).map(str), max_size=4).map(",".join)
    | st.floats().map(str)
    | st.sampled_from(["stash", "1e3", "0x10", "٣", "1_0", "(" * 200, "[" * 5000, "99999999999"])
    | printable
)


def flags(*names: str) -> st.SearchStrategy[list[str]]:
    pair = st.tuples(st.sampled_from([f"--{name}" for name in names]), values)
    return st.lists(pair, max_size=4).map(lambda pairs: [word for p in pairs for word in p])


SETTINGS = ("accumulate", "micro_batches", "backward", "beta", "lag", "hop")
WITH_SETTINGS = st.builds(
    lambda name, pairs: f"{name}:{','.join('='.join(pair) for pair in pairs)}",
    NAMES,
    st.lists(st.tuples(st.sampled_from(SETTINGS), values), max_size=4),
)
TYPED = NAMES | WITH_SETTINGS | printable


@tries(100)
@given(TYPED, flags("stages", "batches"), st.booleans())
def test_any_schedule_is_printed_or_refused(name: str, options: list[str], as_json: bool) -> None:
    assert_answered("schedule", *options, *(["--json"] if as_json else []), "--", name)


@tries(100)
@given(
    TYPED,
    flags("stages", "batches", "forward", "backward", "recompute", "hop", "share", "width"),
    st.booleans(),
)
def test_any_timeline_is_drawn_or_refused(name: str, options: list[str], as_json: bool) -> None:
    assert_answered("timeline", *options, *(["--json"] if as_json else []), "--", name)


FIELDS = {f.name: f.type for f in fields(Experiment)}
choices = st.sampled_from(
    [
        *(kind.name for kind in METHODS),
        *(kind.name for kind in AVERAGINGS),
        "mlp",
        "mlp:hidden=[3]",
        "mlp:hidden=x",
        "mlp:hidden=[0]",
        "mlp:hidden=[-1]",
        "digits-cnn:width=0",
        "dgl:head=x",
        "dsp:lag=3",
        "dsp:lag=(1,0)",
        "adl:accumulate=[]",
        "gpt",
        "digits",
        "text:unit=x",
        "dasgd:every=1e9",
        "diloco:every=2,outer_lr=nan",
    ]
)


def calm(flag: str) -> bool:
    """Not what trains for hours, fetches something from the network or depends on the CPU.

    Some CPUs end a bfloat16 product of odd shapes with an illegal instruction, inside PyTorch.
    """
    return flag not in ("epochs", "data", "data_folder", "device", "seed", "batch_size", "autocast")


@tries(40)
@given(
    st.dictionaries(
        st.sampled_from([name for name in FIELDS if calm(name)]), choices | values, max_size=3
    )
)
@example({"method": "dgl:head=x"})
@example({"method": "dsp:lag=" + "(" * 300})
@example({"cuts": "0"})
@example({"stages": "999999999"})
@example({"lr": "inf"})
@example({"momentum": "-1"})
@example({"weight_decay": "nan"})
@example({"milestones": "x"})
@example({"warmup": "-5"})
@example({"max_steps": "0"})
@example({"milestones": "nan"})
def test_any_training_runs_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, str]
) -> None:
    out = tmp_path_factory.mktemp("run") / "out"
    options = {
        "max_steps": "1",
        "model": "mlp:hidden=[4,4]",
        "batch_size": "64",
        "stages": "2",
    } | options
    bools = [name for name, kind in FIELDS.items() if kind is bool]
    flags = [
        word
        for name, value in options.items()
        for word in ([f"--{name}"] if name in bools else [f"--{name.replace('_', '-')}", value])
    ]
    code = assert_answered("train", *(flag.replace("_", "-") for flag in flags), "--out", str(out))
    if code == 0:
        assert Run.load(out).summary["status"] == "finished"
        assert 1 <= Run.load(out).summary["steps"] <= int(options["max_steps"])


tables = st.dictionaries(
    st.sampled_from([*FIELDS, "method.name", "x"]) | printable, anything, max_size=4
)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return '"none"' if value is None else json.dumps(value).replace("NaN", "nan")


@tries(150)
@given(tables | st.dictionaries(st.sampled_from(list(FIELDS)), tables, max_size=2))
def test_any_configuration_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_text("\n".join(f"{json.dumps(k)} = {toml(v)}" for k, v in table.items()))
    with only_our_errors():
        experiment = Experiment.read(Experiment.from_toml(file))
        assert Experiment.read(experiment.as_dict()) == experiment


@tries(60)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_configuration_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_bytes(data)
    with only_our_errors():
        Experiment.read(Experiment.from_toml(file))


@tries(150)
@given(st.text("0123FBU@ |-#:\nstagefillcycledrain", max_size=60) | NAMES, st.data())
def test_any_text_is_a_schedule_or_refused(text: str, data: Any) -> None:
    if text in {kind.name for kind in METHODS}:  # a sound one with a few letters changed
        method = next(kind for kind in METHODS if kind.name == text)()
        text = str(method.schedule(3))
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.integers(0, len(text)))
            text = text[:place] + data.draw(printable) + text[place + 1 :]
    with only_our_errors():
        assert str(Schedule.parse(text)).split() or not text.strip()
    with only_our_errors():
        Table.parse(text).check()


# ------------------------------------------------------------------------- damaged files


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    assert run_cli("train", "--max-steps", "12", "--stages", "2", "--model", "mlp:hidden=[4]",
                   "--method", "stale-weights", "--out", str(folder))[0] == 0  # fmt: skip
    return folder


@st.composite
def damages(draw: Any) -> list[tuple[str, float, bytes]]:
    kinds = st.sampled_from(["cut", "put", "over", "line", "value"])
    rubbish = st.binary(max_size=6) | st.sampled_from(
        [b"null", b"NaN", b"-1", b'"x"', b"1e999", b"[]", b"{}", b"\xff", b"0", b"9" * 30]
    )
    damage = st.tuples(kinds, st.floats(0, 1), rubbish)
    found: list[tuple[str, float, bytes]] = draw(st.lists(damage, min_size=1, max_size=3))
    return found


def damaged(data: bytes, damages: list[tuple[str, float, bytes]]) -> bytes:
    for kind, where, rubbish in damages:
        place = int(where * len(data))
        if kind == "cut":
            data = data[:place]
        elif kind == "put":
            data = data[:place] + rubbish + data[place:]
        elif kind == "over":
            data = data[:place] + rubbish + data[place + len(rubbish) :]
        elif kind == "line":
            lines = data.splitlines(keepends=True)
            data = b"".join(lines[: int(where * len(lines))] + lines[int(where * len(lines)) + 1 :])
        else:  # another value in a JSON file: still JSON, no longer what it should be
            colon = data.find(b":", place)
            end = min((e for e in (data.find(c, colon) for c in (b",", b"}")) if e > 0), default=0)
            if 0 < colon < end:
                data = data[: colon + 1] + rubbish + data[end:]
    return data


@tries(120)
@given(damages())
def test_a_damaged_ledger_is_refused_or_drawn(
    sound_run: Path, tmp_path_factory: pytest.TempPathFactory, how: Any
) -> None:
    file = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    file.write_bytes(damaged((sound_run / "ledger.jsonl").read_bytes(), how))
    assert_answered("timeline", "--measured", str(file))
    with only_our_errors():
        ledger = Ledger.load(file)
        json.dumps(ledger.chrome_trace())
        measured_timeline(ledger)
        for stage in range(2):
            ledger.lags(stage)


@tries(40)
@given(st.sampled_from(["config.json", "metrics.jsonl", "summary.json", "ledger.jsonl"]), damages())
def test_a_damaged_run_is_refused_or_reported(
    sound_run: Path, tmp_path_factory: pytest.TempPathFactory, name: str, how: Any
) -> None:
    from offbeat.app.report.page import page

    folder = tmp_path_factory.mktemp("damaged")
    for file in sound_run.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), how))
    with only_our_errors():
        text = page([Run.load(folder)])
        assert "</html>" in text
        assert "<script>alert" not in text


@pytest.fixture(scope="module")
def sound() -> Iterator[fuzz.Inputs]:
    with fuzz.sound_inputs() as inputs:
        yield inputs


@pytest.mark.parametrize("what", fuzz.KINDS)
def test_damaged_input_is_refused_or_equal(sound: fuzz.Inputs, what: str) -> None:
    """As ``python -m benchmarks.faults.fuzz`` does, of which the rows are stored."""
    report = fuzz.fuzz(sound, what, seed=LONGER, count=150 * LONGER)
    assert not report.others, "\n".join(report.others)
    assert report.outcomes["refused"] > 10


def test_the_fuzzer_sees_what_is_neither(sound: fuzz.Inputs) -> None:
    class Deaf:
        def mistakes(self, _: random.Random) -> None:
            raise KeyError("inside")

        def losses(self, _: random.Random) -> None:
            fuzz.require(fuzz.same(torch.ones(2), torch.ones(2).double()), "another type")

    for what, words in (("mistakes", "KeyError: 'inside'"), ("losses", "another type")):
        report = fuzz.fuzz(Deaf(), what, 0, 2)  # type: ignore[arg-type]
        assert report.outcomes == {"other": 2}
        assert all(words in line for line in report.others)
    assert not fuzz.same({"x": [1, math.nan]}, {"x": [1, 2.0]})
    assert fuzz.same({"x": [1, math.nan, torch.ones(2)]}, {"x": [1, math.nan, torch.ones(2)]})


def test_stored_rows_are_of_whole_runs_without_a_finding() -> None:
    rows = read_rows(Path(fuzz.__file__).with_name("fuzz.jsonl"))
    assert {row["what"] for row in rows} == {*fuzz.KINDS}
    for row in rows:
        assert row["inputs"] == row["refused"] + row["equal"] >= 50_000
        assert row["other"] == 0


def test_the_fuzzer_would_see_a_traceback() -> None:
    """The judge itself: anything but our own errors comes through."""
    with pytest.raises(KeyError), only_our_errors():
        raise KeyError("inside")
