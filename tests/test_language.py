"""The language benchmark: every run of its sets can be made, and its numbers are added up right."""

from __future__ import annotations

import lzma
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.language import summary
from benchmarks.language.configurations import OPTIMIZERS, SETS, STAGES, WAYS, Comparison
from benchmarks.language.data import Text
from benchmarks.language.pack import FILE, pack
from benchmarks.language.run import best_rates, jobs_of, parser, tuning_jobs
from benchmarks.language.training import Job, share_of_rate, train, trainer_of

CPU = torch.device("cpu")
COMPARISONS = sorted(
    {comparison for of in SETS.values() for comparison in of.comparisons},
    key=lambda comparison: (comparison.optimizer, comparison.way),
)
TINY = {"updates": 2, "rows": 32, "context": 4, "width": 4, "precision": "fp32"}


@pytest.fixture
def text(tmp_path: Path) -> Text:
    source = tmp_path / "text.xz"
    source.write_bytes(lzma.compress(bytes(range(256)) * 20))
    assert pack(source, tmp_path / "packed", 5000) == 5000
    return Text(tmp_path / "packed", CPU)


def job_for(comparison: Comparison, **settings: object) -> Job:
    chosen = {"lr": OPTIMIZERS[comparison.optimizer].rates[0], "seed": 0} | TINY | settings
    return Job(way=comparison.way, optimizer=comparison.optimizer, **chosen)  # type: ignore[arg-type]


def test_packed_bytes_are_the_first_of_the_text(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_bytes(b"all the bytes")
    pack(source, tmp_path / "packed", 7)
    assert np.load(tmp_path / "packed" / FILE).tobytes() == b"all the"


def test_targets_are_the_bytes_that_follow(text: Text) -> None:
    for x, y in [
        *text.batches(updates=2, rows=3, context=5, seed=0),
        *text.validation(batches=2, rows=3, context=5),
    ]:
        assert x.shape == y.shape == (3, 5)
        assert torch.equal((x + 1) % 256, y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_run_of_every_set_can_be_made_and_steps(optimizer: str, text: Text) -> None:
    for comparison in (c for c in COMPARISONS if c.optimizer == optimizer):
        trainer = trainer_of(job_for(comparison), CPU)
        for x, y in text.batches(updates=2, rows=32, context=4, seed=0):
            trainer.step(x, y)
        trainer.flush()
        way = WAYS[comparison.way]
        assert trainer.stages == way.stages
        assert trainer.lags == way.lags


def test_the_lags_are_those_that_the_questions_are_about() -> None:
    assert WAYS["1F1B, M=8"].lags == (1,) * 7 + (0,)
    assert WAYS["1F1B, M=32"].lags == (1,) * 7 + (0,)
    assert WAYS["1F1B, stash"].lags == tuple(range(7, -1, -1))
    assert WAYS["stale, stash"].lags == tuple(range(14, -1, -2))
    assert WAYS["delay 8"].lags == (8,)


def test_bp_as_one_stage_gives_the_bits_of_eight(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the baseline may be the cheaper of the two."""
    states = []
    for stages in (1, STAGES):
        monkeypatch.setitem(WAYS, "BP", replace(WAYS["BP"], stages=stages))
        trainer = trainer_of(job_for(Comparison("BP", "adamw"), width=8), CPU)
        for x, y in text.batches(updates=3, rows=8, context=4, seed=0):
            trainer.step(x, y)
        states.append(trainer.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_reports_what_is_compared(text: Text) -> None:
    found = train(job_for(Comparison("delay 1", "sgd"), updates=4), text, CPU, until=math.inf)
    assert found is not None
    assert [update for update, _ in found["curve"]] == [1, 2, 3, 4]
    assert found["loss"] == found["curve"][-1][1]
    assert found["lags"] == [1]


def test_a_run_that_diverges_ends_early_and_has_no_loss(text: Text) -> None:
    job = job_for(Comparison("BP", "sgd"), updates=8, lr=1e30)
    found = train(job, text, CPU, until=math.inf)
    assert found is not None
    assert found["curve"] == [[2, None]]
    assert found["loss"] is None


def test_the_rate_goes_up_and_down() -> None:
    shares = [share_of_rate(update, 100) for update in range(100)]
    assert shares[9] == 1.0
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] < 0.001


def test_the_best_rate_is_used_once_all_are_known() -> None:
    arguments = parser().parse_args(["--data", "nowhere"])
    tuning = tuning_jobs(arguments, ["adamw", "muon"])
    rows = [job.__dict__ | {"loss": None if job.lr == 4e-3 else 1 / job.lr} for job in tuning[:-1]]
    rates = best_rates(rows, tuning)
    assert rates == {"adamw": 2e-3}  # the highest diverged; one of Muon's runs is missing
    jobs = jobs_of(arguments, "target", rates)
    assert {job.optimizer for job in jobs} == {"adamw"}
    assert len(jobs) == len(SETS["target"].comparisons) // 2 * 5


def test_gaps_are_paired_and_their_interval_is_students() -> None:
    def row(way: str, seed: int, loss: float | None) -> summary.Row:
        job = job_for(Comparison(way, "adamw"), seed=seed)
        return job.__dict__ | {"loss": loss, "lags": list(WAYS[way].lags), "seconds": 1.0}

    rows = [row("BP", seed, 1.0 + seed) for seed in range(3)]
    rows += [row("1F1B, M=8", seed, 1.0 + seed + gap) for seed, gap in enumerate((0.1, 0.2, 0.3))]
    rows += [row("1F1B, M=8 + extrapolate", 0, None)]
    base, lag_one, diverged = summary.found_in(rows, SETS["target"])
    assert base.gap == 0
    assert lag_one.gap == pytest.approx(0.2)
    assert lag_one.half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert summary.verdict(lag_one) == "no"
    assert diverged.gap == math.inf
    text = summary.text_of(rows)
    assert "+0.2000 (-0.0484 to +0.4484)" in text
    assert "1 of 1 diverged" in text
