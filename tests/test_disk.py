"""Files are whole or not there: what a full disk, a kill or a planted link leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from checkpoint_jobs import names_in
from helpers import assert_same_bits, mlp, trainer_for, vector_batches
from offbeat.app.cli import main
from offbeat.app.runs import Run
from offbeat.checkpoints import load_weights, save_weights
from offbeat.errors import CheckpointError, ConfigurationError, StorageError
from offbeat.methods import Synchronous
from offbeat.records import disk
from offbeat.records.ledger import Entry, Ledger

SHORT = ["--epochs", "1", "--max-steps", "4", "--lr", "0.02"]


def offbeat_says(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can be longer: the write that would make it so fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ------------------------------------------------------------------ whole or not there


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    disk.write(file, "before")
    with room_for(100), pytest.raises(StorageError, match="could not be written: File too large"):
        disk.write(file, "x" * 1000)
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
    ledger = Ledger([Entry("F", 0, n, 0, 0.0, 1.0, 2.0) for n in range(9)])
    ledger.save(file)
    with room_for(100), pytest.raises(OSError, match="What was there before is as it was"):
        ledger.save(file)
    assert list(Ledger.load(file)) == list(ledger)
    with pytest.raises(StorageError, match="it is a folder or a device"):
        ledger.save(tmp_path)
    with pytest.raises(StorageError, match="it is a folder or a device"):
        ledger.save("/dev/null")
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full") as error:
        disk.write(tmp_path / "file", "text")
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_line_that_cannot_be_written_is_taken_back(tmp_path: Path) -> None:
    file = disk.Growing(tmp_path / "lines")
    file.add(b"one\n")
    with room_for(6), pytest.raises(StorageError, match="File too large"):
        file.add(b"two\n")
    assert file.path.read_text() == "one\n"
    file.add(b"three\n")
    file.close()
    assert file.path.read_text() == "one\nthree\n"


def test_a_run_that_cannot_store_its_weights_says_so_and_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with room_for(20_000):
        assert offbeat_says("train", *SHORT, "--out", str(out)) == 2
    said = capsys.readouterr().err
    assert "model.safetensors could not be written: File too large." in said
    assert "Traceback" not in said
    assert Run.load(out).summary["status"] == "failed"
    assert not [name for name in os.listdir(out) if name.endswith((".partial", ".safetensors"))]
    assert offbeat_says("train", "--resume", "--out", str(out)) == 0
    assert Run.load(out).summary["status"] == "finished"
    assert load_weights(out / "model.safetensors")


def test_no_room_for_the_configuration_leaves_the_folder_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with room_for(100):
        assert offbeat_says("train", *SHORT, "--out", str(out)) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert names_in(out) == []
    with room_for(1000):
        assert offbeat_says("train", *SHORT, "--out", str(out)) == 2
    assert "config.json could not be written" in capsys.readouterr().err
    assert names_in(out) == []
    assert offbeat_says("train", *SHORT, "--out", str(out)) == 0


# ------------------------------------------------------------------ links


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody else, of which nothing may change."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    contents = {"manifest.json": "{}", "replica-0-stage-0.safetensors": "mine", "file": "mine"}
    for name, content in contents.items():
        (folder / name).write_text(content)
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == contents


def run_of(steps: int) -> offbeat.Trainer:
    trainer = trainer_for(mlp(), Synchronous(), stages=2)
    for x, y in vector_batches(steps):
        trainer.step(x, y)
    return trainer


def test_a_planted_link_is_not_followed_when_a_checkpoint_is_written(
    tmp_path: Path, elsewhere: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".step-000001.partial", ".step-000007.partial", "step-000009"):
        (folder / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="already holds checkpoints"):
        run_of(1).save(folder)
    (folder / "step-000009").unlink()
    trainer = run_of(1)
    place = trainer.save(folder, wait=True)
    assert not place.is_symlink()
    assert names_in(folder) == ["step-000001"]
    shutil.rmtree(place)
    place.symlink_to(elsewhere)
    trainer.save(folder, wait=True)
    assert not place.is_symlink()
    assert names_in(folder) == ["step-000001"]


def test_a_checkpoint_behind_a_link_is_passed_over(tmp_path: Path, elsewhere: Path) -> None:
    folder, trainer = tmp_path / "checkpoints", run_of(2)
    trainer.save(folder, wait=True)
    (folder / "step-000009").symlink_to(elsewhere)
    again = run_of(0)
    with pytest.warns(UserWarning, match="step-000009 cannot be used: it is a link"):
        assert again.resume(folder).step == 2
    (folder / "step-000009").unlink()
    file = folder / "step-000002" / "replica-0-stage-1.safetensors"
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="stage-1.safetensors cannot be read .it is a link"):
        run_of(0).resume(folder)


def test_no_file_is_written_through_a_link(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(elsewhere / "file")
    Ledger([Entry("F", 0, 0, 0, 0.0, 1.0, 2.0)]).save(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    (tmp_path / "lines").symlink_to(elsewhere / "file")
    with pytest.raises(StorageError, match="it is a link, and links in here are not followed"):
        disk.Growing(tmp_path / "lines")
    for name, target in {"metrics.jsonl": "file", "checkpoints": ".", "summary.json": "no"}.items():
        out = tmp_path / f"run with {name}"
        out.mkdir()
        (out / name).symlink_to(elsewhere / target)
        words = ["train", *SHORT, "--save-every", "2", "--out", str(out)]
        assert offbeat_says(*words) == 2
        assert "is a link, and links in a run's folder are not followed" in capsys.readouterr().err
        (out / name).unlink()
        assert offbeat_says(*words) == 0
    (out / "report.html").symlink_to(elsewhere / "file")
    assert offbeat_says("report", str(out), "--out", str(out)) == 0
    (out / "ledger.jsonl").unlink()
    (out / "ledger.jsonl").symlink_to(elsewhere / "file")
    assert offbeat_says("report", str(out), "--out", str(out)) == 0
    assert "it cannot be read" in (out / "report.html").read_text()
    with pytest.raises(ConfigurationError, match="is a link"):
        Run.load(out).ledger()


# ------------------------------------------------------------------ weights that all can read


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("turning", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("low", torch.randn(3).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False, True]))

    def get_extra_state(self) -> Any:
        return {"steps": 3, "scale": torch.tensor(2.0)}

    def set_extra_state(self, state: Any) -> None:
        assert (state["steps"], state["scale"].item()) == (3, 2.0)


def read_plainly(path: Path) -> dict[str, Any]:
    """By the page about safetensors alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    found, expected_begin = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == expected_begin, "no holes"
        expected_begin = end
        found[name] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end])
    assert 8 + length + expected_begin == len(data)
    assert length % 8 == 0
    return found


def test_weights_are_stored_as_every_reader_expects(tmp_path: Path) -> None:
    model = Tied()
    file = tmp_path / "model.safetensors"
    save_weights(model.state_dict(), file)
    found = read_plainly(file)
    assert "head.weight" not in found
    dtype, shape, data = found["embedding.weight"]
    assert (dtype, shape) == ("F32", [5, 4])
    assert np.frombuffer(data, "<f4").tolist() == model.embedding.weight.flatten().tolist()
    assert (found["low"][0], found["norm.num_batches_tracked"][:2]) == ("BF16", ("I64", []))
    read = load_weights(file)
    assert_same_bits(
        {name: value for name, value in read.items() if "extra" not in name},
        {name: value for name, value in model.state_dict().items() if "extra" not in name},
    )
    assert read["head.weight"] is read["embedding.weight"]
    other = Tied()
    other.load_state_dict(read)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    save_weights(model.state_dict(), tmp_path / "model.pt")
    pickled = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(pickled["low"], load_weights(tmp_path / "model.pt")["low"])


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """Names of the same weight come last in a file."""
    return {name: state[name] for name in sorted(state)}


def test_safetensors_own_readers_load_them(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    file = tmp_path / "model.safetensors"
    save_weights(model.state_dict(), file)
    flat = theirs.load_file(file)
    assert sorted(flat) == ["0.weight", "1.bias", "1.weight"]
    other = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    other[2].weight = other[0].weight
    assert theirs.load_model(other, file) == (set(), [])
    assert_same_bits(dict(other.state_dict()), dict(model.state_dict()))
    theirs.save_model(model, file)
    assert_same_bits(in_order(load_weights(file)), in_order(model.state_dict()))


def test_a_trainer_keeps_two_names_of_one_weight_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    trainer = trainer_for(model, Synchronous(), stages=1)
    trainer.step(torch.randn(4, 4), torch.tensor([0, 1, 2, 3]))
    trainer.save(tmp_path, drain=True, wait=True)
    file = tmp_path / "step-000001" / "model.safetensors"
    assert "2.weight" not in read_plainly(file)
    assert_same_bits(in_order(load_weights(file)), in_order(trainer.state_dict()))
    assert trainer.state_dict()["2.weight"] is not model[2].weight


def test_what_holds_no_weights_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load_weights(tmp_path / "none.safetensors")
    for name in ("model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(b"something else")
        with pytest.raises(CheckpointError, match="holds no weights, or it is damaged"):
            load_weights(tmp_path / name)


def test_pickled_weights_are_written_when_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert offbeat_says("train", *SHORT, "--out", str(out), "--model-file", "pt") == 0
    assert not (out / "model.safetensors").exists()
    assert torch.load(out / "model.pt", weights_only=True)


def test_nobody_else_opens_files_to_write_them() -> None:
    """All else goes through ``records/disk.py``, which loses nothing."""
    package = Path(offbeat.__file__).parent
    opening = re.compile(r"write_text\(|write_bytes\(|open\([^)]*[\"'][awx]\+?b?[\"']")
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package) != Path("records/disk.py"):
            assert not opening.search(path.read_text()), path
