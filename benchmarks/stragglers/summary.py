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


def runs_of(result: dict[str, Any], method: str, by: float) -> list[dict[str, Any]]:
    return [r for r in result["runs"] if (r["method"], r["slowdown"]) == (method, by)]


def facts() -> Iterator[tuple[str, float | Interval]]:
    for prefix, file in FILES.items():
        result = read_result(FOLDER / file)
        for method in result["setting"]["methods"]:
            for by in sorted({run["slowdown"] for run in result["runs"]}):
                runs = runs_of(result, method, by)
                key = f"{prefix}{slug(method)}.{100 * by:.0f}"
                yield f"{key}.ms", 1000 * fmean(run["step_s"] for run in runs)
                if by:
                    yield key, mean([run["increase_percent"] for run in runs])


def milliseconds(result: dict[str, Any]) -> str:
    """What a step takes, by method and slow-down."""
    levels = sorted({run["slowdown"] for run in result["runs"]})
    lines = [
        f"| ms a step, slowed | {' | '.join(f'by {by:.0%}' if by else 'never' for by in levels)} |",
        "|---" * (len(levels) + 1) + "|",
    ]
    for method in result["setting"]["methods"]:
        cells = (
            f"{1000 * fmean(run['step_s'] for run in runs_of(result, method, by)):.0f}"
            for by in levels
        )
        lines.append(f"| {method} | {' | '.join(cells)} |")
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
