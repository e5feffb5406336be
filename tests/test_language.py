"""The language benchmark: every run of its sets can be made, and its numbers are added up right."""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.jobs import share_of_rate
from benchmarks.language import figure, summary
from benchmarks.language.configurations import (
    OPTIMIZERS,
    SETS,
    STAGES,
    WAYS,
    Comparison,
    extrapolating,
    optimizer_factory,
)
from benchmarks.language.data import VOCABULARY, Text
from benchmarks.language.ensemble import StackedMuon, ensemble, summed_loss
from benchmarks.language.pack import FILE, pack
from benchmarks.language.run import jobs_of, parser, rates_known, rows_in, tuning_jobs
from benchmarks.language.training import Job, train, trainer_of
from benchmarks.stored import Row
from torch import Tensor, nn

import offbeat
from offbeat.stages.network import Loss
from offbeat.zoo import gpt

FOLDER = Path(__file__).parent.parent / "benchmarks" / "language"
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
    chosen = {"lr": OPTIMIZERS[comparison.optimizer].rates[0], "seeds": (0, 1)} | TINY | settings
    return Job(way=comparison.way, optimizer=comparison.optimizer, **chosen)  # type: ignore[arg-type]


def test_packed_bytes_are_the_first_of_the_text(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_bytes(b"all the bytes")
    pack(source, tmp_path / "packed", 7)
    assert np.load(tmp_path / "packed" / FILE).tobytes() == b"all the"


def test_targets_are_the_bytes_that_follow(text: Text) -> None:
    for x, y in [
        *text.batches(updates=2, rows=3, context=5, seeds=[0, 1]),
        *text.validation(batches=2, rows=3, context=5, networks=2),
    ]:
        assert x.shape == y.shape == (3, 2, 5)
        assert torch.equal((x + 1) % 256, y)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_run_of_every_set_can_be_made_and_steps(optimizer: str, text: Text) -> None:
    for comparison in (c for c in COMPARISONS if c.optimizer == optimizer):
        trainer = trainer_of(job_for(comparison, seeds=(0,)), CPU)
        way = WAYS[comparison.way]
        updates = 1 if way.micro_batches > 8 else 2
        for x, y in text.batches(updates=updates, rows=32, context=4, seeds=[0]):
            trainer.step(x, y)
        trainer.flush()
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
        for x, y in text.batches(updates=3, rows=8, context=4, seeds=[0, 1]):
            trainer.step(x, y)
        states.append(trainer.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_each_network_of_an_ensemble_learns_what_it_learns_alone(text: Text) -> None:
    """Alone: the zoo's own gpt with PyTorch's AdamW."""
    seeds, lr = (3, 5), 0.01
    make = partial(gpt, VOCABULARY, context=6, layers=STAGES, width=4)
    made = ensemble(make, seeds)
    optimizer = optimizer_factory("adamw", lr, made, recorded=False, extrapolated=False)
    together = trained(made, summed_loss, optimizer, text, seeds)
    for place, seed in enumerate(seeds):
        torch.manual_seed(seed)
        own = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
        alone = trained(make(), loss_alone, own, text, [seed])
        pairs = zip(together.parameters(), alone.parameters(), strict=True)
        for stack, weight in pairs:  # the benchmark's losses are in single precision
            torch.testing.assert_close(stack[place], weight, rtol=0, atol=1e-3 * lr)


def trained(
    model: nn.Sequential, loss: Loss, optimizer: Any, text: Text, seeds: Sequence[int]
) -> nn.Module:
    way = WAYS["1F1B, M=8 + extrapolate"]
    trainer = offbeat.Trainer(
        model.double(),
        loss=loss,
        optimizer=optimizer,
        method=way.method,
        corrections=way.corrections,
        cuts=range(2, STAGES + 1),
        seed=0,
    )
    for x, y in text.batches(updates=4, rows=16, context=6, seeds=seeds):
        one = len(seeds) == 1
        trainer.step(x.squeeze(1) if one else x, y.squeeze(1) if one else y)
    trainer.flush()
    return trainer.model


def loss_alone(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("shape", [(4, 4), (12, 4), (4, 12)])
def test_muon_for_stacks_is_pytorch_s_for_each_matrix(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = nn.Parameter(torch.randn(3, *shape, generator=generator))
    singles = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    ours = StackedMuon([stack], 0.1, momentum=0.95, decay=0.01)
    settings: Any = {"lr": 0.1, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon(singles, momentum=0.95, **settings)
    for _ in range(3):
        stack.grad = torch.randn(3, *shape, generator=generator)
        for single, gradient in zip(singles, stack.grad, strict=True):
            single.grad = gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stack, torch.stack([*singles]), rtol=0, atol=1e-6)


def test_an_extrapolating_optimizer_goes_on_along_the_change_of_its_steps() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    extrapolating(optimizer)
    found = []
    for gradient in (1.0, 2.0, 5.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        found.append(weight.item())
    assert found == [0.0, -3.0, -11.0]  # steps of -1, then -2 - 1, then -5 - 3


def test_a_run_reports_what_is_compared(text: Text) -> None:
    found = train(job_for(Comparison("delay 1", "sgd"), updates=4), text, CPU, until=math.inf)
    assert found is not None
    assert [update for update, _ in found["curve"]] == [1, 2, 3, 4]
    assert found["curve"][-1][1] == pytest.approx(sum(found["losses"]) / 2, abs=2e-6)
    assert found["lags"] == [1]


def test_a_run_that_diverges_has_no_loss(text: Text) -> None:
    job = job_for(Comparison("BP", "sgd"), updates=8, lr=1e30)
    found = train(job, text, CPU, until=math.inf)
    assert found is not None
    assert found["curve"][-1] == [8, None]
    assert found["losses"] == [None, None]


def test_the_rate_goes_up_and_down() -> None:
    shares = [share_of_rate(update, 100) for update in range(100)]
    assert shares[9] == 1.0
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] < 0.001


def test_the_best_rate_is_used_once_all_are_known() -> None:
    arguments = parser().parse_args(["--data", "nowhere"])
    tuning = tuning_jobs(arguments, ["adamw", "muon"])
    _, middle, highest = OPTIMIZERS["adamw"].rates
    rows = [
        job.__dict__ | {"losses": [1.0, None, 1.0] if job.lr == highest else 3 * [2 - 100 * job.lr]}
        for job in tuning[:-1]
    ]
    rates = rates_known(rows, tuning)
    assert rates == {"adamw": middle}  # the highest diverged; one of Muon's runs is missing
    jobs = jobs_of(arguments, "target", rates)
    assert {job.optimizer for job in jobs} == {"adamw"}
    assert len(jobs) == len(SETS["target"].comparisons) // 2
    assert {job.seeds for job in jobs} == {tuple(range(5))}
    curve = jobs_of(arguments, "curve", rates)
    assert {job.lr for job in curve if job.way == "BP"} == {middle}
    assert {job.lr for job in curve if job.way == "delay 2"} == {middle, middle / 2, middle / 4}
    with_seeds = parser().parse_args(["--data", "nowhere", "--seeds", "7", "8"])
    assert tuning_jobs(with_seeds, ["adamw", "muon"]) == tuning  # of which all seeds use the rates
    assert {job.seeds for job in jobs_of(with_seeds, "target", rates)} == {(7, 8)}


def test_gaps_are_paired_and_their_interval_is_students() -> None:
    def row(way: str, seeds: tuple[int, ...], *losses: float | None) -> Row:
        job = job_for(Comparison(way, "adamw"), seeds=seeds)
        lags = list(WAYS[way].lags)
        return job.__dict__ | {"losses": list(losses), "lags": lags, "ms_per_update": 1.0}

    rows = [row("BP", (0,), 1.0), row("BP", (2, 1), 3.0, 2.0)]
    rows += [row("1F1B, M=8", (0, 1, 2), 1.1, 2.2, 3.3)]
    rows += [row("1F1B, M=8 + extrapolate", (0,), None)]
    base, lag_one, diverged = summary.found_in(rows, SETS["target"])
    assert base.gap == 0
    assert lag_one.gap == pytest.approx(0.2)
    assert lag_one.half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert summary.verdict(lag_one) == "no"
    assert diverged.gap == math.inf
    text = summary.text_of(rows)
    assert "+0.2000 (-0.0484 to +0.4484)" in text
    assert "1 of 1 diverged" in text


def test_what_lags_is_compared_with_bp_at_its_best_rate() -> None:
    def row(way: str, lr: float, *losses: float) -> Row:
        job = job_for(Comparison(way, "adamw"), seeds=tuple(range(len(losses))), lr=lr)
        return job.__dict__ | {"losses": list(losses), "lags": list(WAYS[way].lags)}

    rows = [row("BP", 0.002, 1.5, 1.6), row("BP", 0.004, 1.0, 1.2), row("BP", 0.004, 1.0, 1.2, 3.0)]
    rows += [row("delay 1", 0.004, 2.0, 2.4), row("delay 1", 0.002, 1.25, 1.35)]
    base, at_bps, at_half = found = summary.found_in(rows, SETS["curve"])
    assert (base.lr, base.losses) == (0.004, [1.0, 1.2, 3.0])
    assert at_bps.gaps == pytest.approx([1.0, 1.2])
    assert at_half.gaps == pytest.approx([0.25, 0.15])  # not to BP at 0.002
    assert summary.best_of_rates(found) == [base, at_half]
    assert "| adamw, 0.002 | +0.2000" in summary.text_of(rows)


def test_stored_results_are_drawn() -> None:
    rows = rows_in(FOLDER / "results.jsonl")
    drawn = figure.draw(summary.settings_of(rows)[0])
    assert all(panel.has_data() for panel in drawn.axes)
