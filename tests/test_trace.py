"""The way of a batch through the code stays short: benchmarks/trace counts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.trace.run import Trace, trace, trace_step

from offbeat.schedules.schedule import Schedule

FOLDER = Path(__file__).parent.parent / "benchmarks" / "trace"
MOST_CROSSINGS = 228
"""Lower it when the way has become shorter. Before raising it ask whether a file may know less."""


def test_calls_are_counted_by_caller_and_callee() -> None:
    def user() -> None:
        Schedule.parse("stage 0: fill - | cycle 0F0 0B0 0U0 | drain -")

    found = trace(user)
    assert found.calls["the user: -> schedules/schedule.py:Schedule.parse"] == 1
    assert found.pairs()["schedules/schedule.py", "schedules/table.py"] >= 3
    two = Trace({"a.py:f -> a.py:g": 3, "a.py:g -> b.py:h": 2, "the user: -> a.py:f": 1})
    assert two.figures() == {"calls": 6, "functions": 3, "files": 2, "crossings": 6}


def test_a_step_crosses_few_files() -> None:
    found = trace_step()
    assert "trainer.py" in str(found)
    assert 0 < found.figures()["crossings"] <= MOST_CROSSINGS


def test_the_readme_has_the_stored_figures() -> None:
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("*.json"):
        stored = json.loads(path.read_text())
        figures = stored["figures"]
        assert Trace(stored["calls"]).figures() == figures
        row = " | ".join(map(str, figures.values()))
        assert f"| {row} | [{path.name}]({path.name}) |" in text
