"""benchmarks/accuracy: which runs are made, and which are compared."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.accuracy import training
from benchmarks.accuracy.configurations import BASELINE, SETS, WAYS
from benchmarks.accuracy.ensemble import GroupedNorm
from benchmarks.accuracy.figure import BY_SHARE, draw, draw_shares
from benchmarks.accuracy.run import jobs_of
from benchmarks.accuracy.summary import of_set, rows_in, stored_rows, text_of
from benchmarks.accuracy.training import Job, slow_down_statistics
from torch import nn

FOLDER = Path(__file__).parent.parent / "benchmarks" / "accuracy"


def jobs(name: str, **given: Any) -> list[Job]:
    settings = {
        "ways": "*", "groups": None, "epochs": None, "rows": 60_000, "compile": False,
        "device": "cuda",
    }  # fmt: skip
    return jobs_of(Namespace(**(settings | given)), name)


def row(job: Job, accuracies: list[float]) -> dict[str, Any]:
    return asdict(job) | {"accuracies": accuracies, "lags": [1, 0], "stale_share": 0.5}


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_bp_and_all_its_ways_for_all_its_seeds(name: str) -> None:
    made = jobs(name)
    of = SETS[name]
    assert {job.way for job in made} == {BASELINE, *of.ways}
    assert len({job.key for job in made}) == len(made)
    for way in of.ways:
        trained = [job for job in made if job.way == way]
        assert sum(len(job.seeds) for job in trained) == of.count * len(of.cuts) * len(of.rates)
        for job in trained:
            partners = [bp for bp in made if bp.way == BASELINE and bp.setting == job.setting]
            assert set(job.seeds) <= {seed for bp in partners for seed in bp.seeds}
    assert {job.epochs for job in made} == {of.epochs}
    assert {job.epochs for job in jobs(name, epochs=2)} == {2}


def test_runs_are_compared_with_bp_of_their_seed_and_length() -> None:
    long, short = jobs("twenty", ways="1F1B, stash"), jobs("twenty-briefly", ways="stale, stash")
    rows = [
        row(long[0], [0.90, 0.91, 0.92, 0.93, 0.94]),
        row(long[1], [0.89, 0.91, 0.90, 0.93, 0.94]),
        row(short[0], [0.80] * 5),
        row(short[1], [0.79] * 5),
    ]
    (found,) = of_set(rows, "twenty")
    assert [summary.way for summary in found] == [BASELINE, "1F1B, stash"]
    assert found[1].gaps == pytest.approx([1, 0, 2, 0, 0])
    (found,) = of_set(rows, "twenty-briefly")
    assert found[1].gap == pytest.approx(1)
    assert "10 epochs" in text_of(rows)
    assert of_set(rows[2:], "twenty") == []
    other = [row(job, [0.5] * 5) for job in jobs("twenty", epochs=3)]
    assert f"{len(other)} runs of other lengths" in text_of(rows + other)


def test_seeds_that_guess_are_counted_and_left_out() -> None:
    bp, stale = jobs("twenty", ways="1F1B, stash")
    rows = [row(bp, [0.9] * 5), row(stale, [0.88, 0.1, 0.88, 0.88, 0.1])]
    _, found = of_set(rows, "twenty")[0]
    assert found.gap == pytest.approx(2)
    assert found.counted == "3 of 5"
    rows = [row(bp, [0.9] * 5), row(stale, [0.1] * 5)]
    _, found = of_set(rows, "twenty")[0]
    assert found.gap == pytest.approx(80)
    assert found.counted == "5"


@pytest.mark.parametrize("name", ["eight", "four", "twenty", "twenty-briefly"])
def test_stored_results_are_drawn(name: str) -> None:
    found, *_ = of_set(stored_rows(), name)
    assert all(panel.has_data() for panel in draw({name: found}).axes)


def test_slow_statistics_move_as_far_per_batch_as_they_did() -> None:
    alone, grouped = nn.BatchNorm2d(2), GroupedNorm([nn.BatchNorm2d(2)])
    slow_down_statistics(nn.Sequential(alone, grouped), 8)
    for norm in (alone, grouped):
        assert norm.momentum is not None
        assert (1 - norm.momentum) ** 8 == pytest.approx(0.9)
    ways = [WAYS[name] for name in SETS["statistics"].ways]
    assert all(way.slow_statistics for way in ways)
    assert {way.method(10).schedule(8).micro_batches for way in ways} == {4, 8}


def test_gaps_are_drawn_against_the_share_of_stale_weights() -> None:
    found, *_ = of_set(rows_in([FOLDER / "registers.jsonl"]), BY_SHARE)
    (axes,) = draw_shares(found).axes
    drawn = axes.containers[0].lines[0].get_xydata()  # type: ignore[attr-defined]
    expected = [(100 * s.stale_share, s.gap) for s in found if s.way == "stale, current"]
    assert drawn.tolist() == [list(pair) for pair in expected]


class FewImages:
    """Updates of which the first takes 3 s and every other one 105 ms, by a clock of their own."""

    def __init__(self, updates: int) -> None:
        self.clock, self._updates = 0.0, updates
        self.test = [(torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.long))]

    def __len__(self) -> int:
        return 4 * self._updates

    def batches_of(
        self, _seeds: Sequence[int], size: int, *, epoch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for update in range(self._updates):
            self.clock += 0.105 if update + epoch else 3.0
            yield torch.zeros(1, size, 1, 28, 28), torch.zeros(1, size, dtype=torch.long)


@pytest.mark.parametrize("updates", [1, 2, 8, 60])
def test_time_per_update_leaves_out_the_first_ones_however_short_a_run_is(
    updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FewImages(updates)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: data.clock))
    job = Job(
        network="lenet5", stages=None, cuts=None, ppv=None, way=BASELINE, seeds=(0,), epochs=1,
        rows=10_000, batch=4, lr=0.01, momentum=0.9, weight_decay=0.0, bf16=False,
    )  # fmt: skip
    found = training.train(job, data, torch.device("cpu"), until=1e9)
    assert found is not None
    assert found["ms_per_update"] == (None if updates == 1 else pytest.approx(105))
