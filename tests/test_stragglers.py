"""benchmarks/stragglers: its picture says what the stored rows say."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.stored import read_result
from benchmarks.stragglers.figure import draw
from benchmarks.stragglers.summary import increases_of, times_of

FOLDER = Path(__file__).parent.parent / "benchmarks" / "stragglers"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = read_result(FOLDER / "results.jsonl")
    return found


def test_the_picture_shows_milliseconds_beside_the_increase(result: dict[str, Any]) -> None:
    """By the increase alone DSP with slack looked better than ADL, whose step is shorter."""
    left, right = draw(result).axes
    assert left.get_ylabel() == "mean time per step, ms (log axis)"
    assert right.get_ylabel().startswith("increase")
    assert len(left.containers) == len(right.containers) == 8


def test_adl_is_faster_than_dsp_with_slack_in_milliseconds_and_rises_more(
    result: dict[str, Any],
) -> None:
    times, increases = times_of(result), increases_of(result)
    for by in (0.0, 0.2, 0.5, 1.0, 1.5):
        dsp = min(fmean(times[f"DSP hop {hop}"][by]) for hop in (1, 2, 3))
        assert fmean(times["ADL M=1"][by]) < dsp
    assert fmean(increases["ADL M=1"][1.5]) > fmean(increases["DSP hop 3"][1.5])
