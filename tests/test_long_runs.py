"""Memory and checkpoints of a long run do not grow: older actions are in a file, or counted."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from helpers import trainer_for
from offbeat.averaging import DaSGD
from offbeat.engines.launcher import launch
from offbeat.errors import ConfigurationError
from offbeat.methods import ADL, StaleWeights
from offbeat.records.ledger import Ledger

STEPS, MOST = 1000, 500


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 2), torch.zeros(2).long()


def run(steps: int, most: int | None = None, folder: Path | None = None) -> offbeat.Trainer:
    trainer = trainer_for(
        tiny(), StaleWeights(), stages=3, replicas=2, averaging=DaSGD(every=4, delay=1)
    )
    if most is not None:
        trainer.own_ledger.most = most
    for step in range(steps):
        if folder is not None and step == 1:
            trainer.save(folder, wait=True)
        trainer.step(*batch())
    return trainer


def facts(ledger: Ledger) -> list[tuple[Any, ...]]:
    """All but times."""
    return sorted((e.replica, e.stage, e.batch, e.kind, e.version) for e in ledger)


@pytest.fixture(scope="module")
def whole() -> Ledger:
    return run(STEPS).ledger


def counts_of(ledger: Ledger) -> dict[tuple[int, int], dict[int, int]]:
    return {
        (replica, stage): dict(Counter(ledger.lags(stage, replica).values()))
        for replica in range(2)
        for stage in range(3)
    }


def test_without_a_folder_older_actions_are_counted_and_no_count_differs(whole: Ledger) -> None:
    with pytest.warns(UserWarning, match="keeps the newest 500 actions.*counted from here") as told:
        ledger = run(STEPS, MOST).ledger
    assert len(told) == 1
    assert len(ledger) == len(whole) > 15_000
    assert len(ledger.to_bytes()) < 49 * (2 * MOST + 1100)
    assert {p: dict(line.lags) for p, line in ledger.tally().items()} == counts_of(whole)
    for place, line in whole.tally().items():
        ours = ledger.tally()[place]
        assert (ours.rows, ours.updates, ours.averages) == (line.rows, line.updates, line.averages)
        assert ours.averages > 0
    assert len(ledger.tail(300)) == 300
    assert [e.batch for e in ledger.tail(9)] == [e.batch for e in whole.tail(9)]
    assert all(0 < share <= 1 for share in ledger.busy_shares(3))
    for ask in (
        lambda: ledger.lags(0),
        lambda: list(ledger),
        lambda: ledger[0],
        lambda: ledger.losses(2),
        lambda: ledger.waits(0),
        ledger.chrome_trace,
        lambda: ledger.save(os.devnull + "x"),
    ):
        with pytest.raises(ConfigurationError, match=r"are counted only: ask for tally\(\)"):
            ask()


def test_with_a_folder_older_actions_are_in_a_file(tmp_path: Path, whole: Ledger) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger = run(STEPS, MOST, tmp_path).ledger
    assert facts(ledger) == facts(whole)
    assert counts_of(ledger) == counts_of(whole)
    assert {p: dict(line.lags) for p, line in ledger.tally().items()} == counts_of(whole)
    assert ledger[7][:6] == next(e for n, e in enumerate(ledger) if n == 7)[:6]
    (part,) = ledger.parts()
    data = Path(part.path).read_bytes()
    assert hashlib.sha256(data).hexdigest() == part.sha256
    read = list(struct.iter_unpack("<biqqdddi", data))
    assert len(read) == part.rows == len(ledger) - len(ledger.to_bytes()) // 49


def test_going_on_cuts_the_file_back_to_the_checkpoint(tmp_path: Path, whole: Ledger) -> None:
    folder = tmp_path / "one"
    first = run(600, MOST, folder)
    first.save(folder, wait=True)
    saved = first.ledger.parts()[0].rows
    size = sum(len(file.read_bytes()) for file in (folder / "step-000600").iterdir())
    for _ in range(300):  # of which no checkpoint knows
        first.step(*batch())
    del first
    moved = shutil.copytree(folder, tmp_path / "moved")
    shutil.rmtree(folder)
    again = run(0, MOST)
    assert again.resume(moved).step == 600
    (part,) = again.ledger.parts()
    assert (Path(part.path).parent, part.rows) == (moved, saved)
    assert os.path.getsize(part.path) > 49 * saved
    for _ in range(400):
        again.step(*batch())
    again.save(moved, wait=True)
    assert os.path.getsize(part.path) == 49 * saved
    assert again.ledger.parts()[0].rows == saved
    assert facts(again.ledger) == facts(whole)
    grown = sum(len(file.read_bytes()) for file in (moved / "step-001000").iterdir())
    assert grown < size + 49 * 1100
    other = run(0, MOST)
    other.resume(moved)
    assert facts(other.ledger) == facts(whole)
    assert len(other.ledger.parts()) == 2


def test_a_full_disk_leaves_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_disk import room_for

    trainer = run(2, MOST, tmp_path)

    def go() -> None:
        for _ in range(500):
            trainer.step(*batch())

    with room_for(10_000), pytest.warns(UserWarning, match="counted from here on: .*too large"):
        go()
    assert trainer.ledger.tally()[0, 0].updates > 400
    with pytest.raises(ConfigurationError, match="are counted only"):
        trainer.ledger.lags(0)


def in_processes(folder: str) -> list[Any]:
    trainer = trainer_for(tiny(), ADL(accumulate=2), stages=3)
    trainer.own_ledger.most = MOST
    trainer.step(torch.ones(4, 2), torch.zeros(4).long())
    trainer.save(folder, wait=True)
    for _ in range(700):
        trainer.step(torch.ones(4, 2), torch.zeros(4).long())
    ledger = trainer.ledger
    counts = [dict(ledger.tally()[0, stage].lags) for stage in range(3)]
    ends = [entry.end_s for entry in ledger]
    assert ends == sorted(ends)
    assert len(ledger.parts()) == 3
    trainer.save(folder, wait=True)
    return [counts, facts(ledger)]


def test_processes_keep_a_file_each(tmp_path: Path) -> None:
    found = launch(in_processes, 3, str(tmp_path))
    trainer = trainer_for(tiny(), ADL(accumulate=2), stages=3)
    for _ in range(701):
        trainer.step(torch.ones(4, 2), torch.zeros(4).long())
    expected = [dict(Counter(trainer.ledger.lags(stage).values())) for stage in range(3)]
    for counts, rows in found:
        assert counts == expected
        assert rows == facts(trainer.ledger)
    again = trainer_for(tiny(), ADL(accumulate=2), stages=3)
    assert again.resume(tmp_path).step == 701
    assert facts(again.ledger) == facts(trainer.ledger)
    assert [dict(again.ledger.tally()[0, stage].lags) for stage in range(3)] == expected
