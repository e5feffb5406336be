"""What a run says of its lags, checked by the command, and by a script that knows no offbeat."""

from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offbeat
from helpers import mlp, trainer_for, vector_batches
from offbeat.app.cli import main
from offbeat.averaging import DaSGD
from offbeat.methods import ADL, Phases, PipeDream, PipeDream2BW, StaleWeights, Synchronous
from offbeat.records import disk

SCRIPT = Path(__file__).parents[1] / "examples" / "check_certificate.py"
check = runpy.run_path(str(SCRIPT))["check"]


def offbeat_says(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("certified") / "run"
    words = ["--method", "stale-weights", "--stages", "3", "--epochs", "1", "--lr", "0.02"]
    assert offbeat_says("train", *words, "--save-every", "10", "--out", str(out)) == 0
    return out


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_a_run_is_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offbeat_says("verify", str(run)) == 0
    told = capsys.readouterr().out
    assert "WRONG" not in told
    for words in (
        "ok    69 micro-batches were applied within the declared lags 4 2 0",
        "ok    model.safetensors is as it was written",
        "ok    config.json is as it was written",
        "ok    step-000020 is as it was written",
    ):
        assert words in told
    assert offbeat_says("verify", str(run / "checkpoints")) == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "ledger.jsonl",
        "checkpoints/step-000010/replica-0-stage-1.safetensors",
        "checkpoints/step-000010/manifest.json",
    ],
)
def test_any_changed_file_is_found(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy / name)
    assert offbeat_says("verify", str(copy)) == 1
    (wrong,) = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert wrong.split()[1] in name


@pytest.mark.parametrize("name", ["certificate.json", "config.json"])
def test_a_changed_certificate_is_refused(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy / name
    file.write_text(file.read_text().replace("3", "2", 1))
    assert offbeat_says("verify", str(copy)) == 2
    assert f"{name} cannot be used" in capsys.readouterr().err
    if name == "certificate.json":
        assert check(str(file)) != []


def test_what_cannot_be_verified_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offbeat_says("verify", str(tmp_path)) == 2
    assert "has neither certificate.json nor checkpoints" in capsys.readouterr().err


def told_of(trainer: offbeat.Trainer, steps: int) -> dict[str, Any]:
    for x, y in vector_batches(steps):
        trainer.step(x, y)
    trainer.flush()
    told: dict[str, Any] = json.loads(json.dumps(trainer.ledger.certificate()))
    return told


METHODS = [
    Synchronous(),
    StaleWeights(),
    ADL(accumulate=2),
    PipeDream2BW(),
    Phases((StaleWeights(), 4), (Synchronous(), None)),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_certificates_tell_what_the_ledger_shows(tmp_path: Path, method: Any) -> None:
    trainer = trainer_for(mlp(), method, stages=3)
    told = told_of(trainer, 9)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(told))
    assert check(str(file)) == []
    declared = [m.lags(3) for m, _ in trainer.phases]
    assert told["declared"] == [max(of_stage) for of_stage in zip(*declared, strict=True)]
    for line in told["stages"]:
        lags = Counter(trainer.ledger.lags(line["stage"]).values())
        assert {int(lag): count for lag, count in line["lags"].items()} == lags
        assert line["updates"] == 9
    assert told["rows"] == len(trainer.ledger)


def test_a_lag_beyond_the_declared_one_is_found(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy / "certificate.json"
    told, _ = disk.unsealed(file.read_bytes())
    told["declared"][0] = 3
    file.write_text(disk.sealed(told))
    assert offbeat_says("verify", str(copy)) == 1
    assert "with a lag of up to 4, and 3 was declared" in capsys.readouterr().out
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "with lag 4" in ended.stdout


def test_averages_and_their_delays_are_told() -> None:
    averaging = DaSGD(every=2, delay=1)
    trainer = trainer_for(mlp(), Synchronous(), stages=2, replicas=2, averaging=averaging)
    for line in told_of(trainer, 9)["stages"]:
        assert line["averages"] == {"merged": 4, "newest": 8, "delays": {"1": 4}}


def test_rows_on_disk_are_counted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_for(mlp(), PipeDream(), stages=2)
    trainer.own_ledger.most = 100
    for step in range(400):
        trainer.step(*vector_batches(1)[0])
        if step in (0, 399):
            trainer.save(tmp_path, wait=True)
    certificate = tmp_path / "certificate.json"
    told = trainer.ledger.certificate()
    certificate.write_text(json.dumps(told))
    assert told["files"][0]["rows"] >= 1024
    assert offbeat_says("verify", str(tmp_path)) == 0
    assert "rows are as they were written" in capsys.readouterr().out
    fewer = json.loads(certificate.read_text())
    fewer["stages"][0]["lags"]["1"] = 5
    certificate.write_text(json.dumps(fewer))
    assert offbeat_says("verify", str(tmp_path)) == 1
    assert "more of lag 1 at stage 0 than is told" in capsys.readouterr().out
    certificate.write_text(json.dumps(told))
    (rows,) = tmp_path.glob("*.rows")
    flip(rows)
    assert offbeat_says("verify", str(tmp_path)) == 1
    assert "its digest differs" in capsys.readouterr().out
    os.truncate(rows, 490)
    assert offbeat_says("verify", str(tmp_path)) == 1
    assert "has lost" in capsys.readouterr().out


def test_the_script_stands_alone_in_forty_lines(run: Path) -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 40
    imported = {
        a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names
    }
    assert imported == {"hashlib", "json", "sys"}
    words = [sys.executable, "-I", str(SCRIPT), str(run / "certificate.json")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "every lag is within what was declared\n")
