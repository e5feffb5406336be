"""The largest stable learning rates as tables: by lag and correction, and by averaging."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pages import slug
from benchmarks.stored import read_result

HERE = Path(__file__).parent
PLAIN, UNCORRECTED = "momentum 0.9", ("SGD", "momentum 0.9")
WAYS = ((0.0, "keep"), (0.9, "keep"), (0.9, "average"))
"""Momentum, and what becomes of it at a merge."""
LEAST = 0.00502
"""What stands no more than this diverged with every rate that was tried."""


def thresholds() -> dict[str, dict[str, float]]:
    """By rule and lag."""
    found: dict[str, dict[str, float]] = read_result(HERE / "results.json")["thresholds"]
    return found


@cache
def averages() -> dict[tuple[str, float, str], tuple[float, str]]:
    """By rule, momentum and policy, the largest stable rate and what diverges above it."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (HERE / "averages.jsonl").read_text().splitlines()[1:]
    ]
    return {
        (row["rule"], row["momentum"], row["state"]): min(
            (row[mode], mode) for mode in ("mean", "disagreement") if row[mode] is not None
        )
        for row in rows
    }


def facts() -> Iterator[tuple[str, float]]:
    for rule, by_lag in thresholds().items():
        for lag, value in by_lag.items():
            yield f"{slug(rule)}.{lag}", value
    for lag, plain in thresholds()[PLAIN].items():
        singles = [r for r in thresholds() if r not in UNCORRECTED and "+" not in r]
        ratios = [thresholds()[rule][lag] / plain for rule in singles]
        yield f"single.{lag}.least", min(ratios)
        yield f"single.{lag}.most", max(ratios)
    for (rule, momentum, state), (value, _) in averages().items():
        yield f"averages.{slug(rule)}.{'plain' if not momentum else state}", value


def tables() -> dict[str, str]:
    lags = list(next(iter(thresholds().values())))
    lines = [f"| rule | lag {' | '.join(lags)} |", "|---" * (len(lags) + 1) + "|"]
    for rule, by_lag in thresholds().items():
        lines.append(f"| {rule} | {' | '.join(f'{value:.3f}' for value in by_lag.values())} |")
    return {"thresholds": "\n".join(lines), "averages": _averages()}


def _averages() -> str:
    lines = [
        "| averaging | no momentum | momentum 0.9, kept | momentum 0.9, averaged |",
        "|---|---|---|---|",
    ]
    for rule in dict.fromkeys(rule for rule, *_ in averages()):
        cells = (_cell(averages().get((rule, *way))) for way in WAYS)
        lines.append(f"| `{rule}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: tuple[float, str] | None) -> str:
    if found is None:
        return "-"
    value, mode = found
    return f"{'below 0.005' if value < LEAST else f'{value:.3f}'} ({mode})"
