"""How much longer a step takes when stages are slowed at random, in percent and milliseconds."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.intervals import Interval, mean
from benchmarks.pages import slug
from benchmarks.stored import read_result

FOLDER = Path(__file__).parent
FILES = {"": "results.jsonl", "real.": "results-real.jsonl"}


Lines = dict[str, dict[float, list[float]]]
"""Per method and slow-down a value of every seed."""


def times_of(result: dict[str, Any]) -> Lines:
    """Milliseconds per step, also without faults."""
    lines: Lines = {}
    for row in result["runs"]:
        of_method = lines.setdefault(row["method"], {})
        of_method.setdefault(row["slowdown"], []).append(1000 * row["step_s"])
    return lines


def increases_of(result: dict[str, Any]) -> Lines:
    """Percent of the same seed's time without faults."""
    lines: Lines = {}
    for row in result["runs"]:
        if row["slowdown"]:
            of_method = lines.setdefault(row["method"], {})
            of_method.setdefault(row["slowdown"], []).append(row["increase_percent"])
    return lines


def facts() -> Iterator[tuple[str, float | Interval]]:
    for prefix, file in FILES.items():
        result = read_result(FOLDER / file)
        times, increases = times_of(result), increases_of(result)
        for method, line in times.items():
            for by, values in line.items():
                key = f"{prefix}{slug(method)}.{100 * by:.0f}"
                yield f"{key}.ms", fmean(values)
                if by:
                    yield key, mean(increases[method][by])


def milliseconds(result: dict[str, Any]) -> str:
    """What a step takes, by method and slow-down: means over seeds."""
    times = times_of(result)
    levels = sorted(next(iter(times.values())))
    lines = [
        f"| method | {' | '.join(f'by {by:.0%}' if by else 'no faults' for by in levels)} |",
        "|---" * (len(levels) + 1) + "|",
    ]
    for method, line in times.items():
        lines.append(f"| {method} | {' | '.join(f'{fmean(line[by]):.1f}' for by in levels)} |")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """The increase in percent: measured, in brackets what the model says."""
    levels = sorted({row["slowdown"] for row in result["summary"]})
    lines = [
        f"| method | step, ms | {' | '.join(f'by {by:.0%}' for by in levels)} |",
        "|---" * (len(levels) + 2) + "|",
    ]
    for name in dict.fromkeys(row["method"] for row in result["summary"]):
        rows = {row["slowdown"]: row for row in result["summary"] if row["method"] == name}
        cells = [
            f"{row['increase_percent']:.1f} ({row['model_percent']:.1f};"
            f" {row['model_long_run_percent']:.1f})"
            for row in (rows[by] for by in levels)
        ]
        plain_ms = 1000 * rows[levels[0]]["plain_step_s"]
        lines.append(f"| {name} | {plain_ms:.1f} | {' | '.join(cells)} |")
    floors = [f"{100 * result['setting']['probability'] * by:.1f}" for by in levels]
    lines.append(f"| floor: a third of the slow-down | | {' | '.join(floors)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    found = {}
    for prefix, file in FILES.items():
        result = read_result(FOLDER / file)
        found[f"{prefix}increase"], found[f"{prefix}ms"] = table(result), milliseconds(result)
    return found
