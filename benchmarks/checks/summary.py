"""What the checks of a step cost, in percent of a step without them: medians of rounds."""

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.intervals import Interval
from benchmarks.stored import read_rows

ROWS = Path(__file__).with_name("results.jsonl")


def facts() -> Iterator[tuple[str, float | Interval]]:
    shares: dict[str, list[float]] = {}
    for row in read_rows(ROWS):
        share = 100 * (row["checked_s"] / row["unchecked_s"] - 1)
        shares.setdefault(f"{row['model']}.{row['method'].replace(' ', '-')}", []).append(share)
    for name, values in shares.items():
        yield name, middle(values)
    real = [median(values) for name, values in shares.items() if not name.startswith("mlp")]
    yield "most", max(real)
    milliseconds: dict[str, list[float]] = {}
    for row in read_rows(ROWS):
        milliseconds.setdefault(row["model"], []).append(1e3 * row["unchecked_s"])
    for model, values in milliseconds.items():
        yield f"{model}.ms", median(values)


def tables() -> dict[str, str]:
    lines = ["| model | method | ms | percent |", "|---|---|---|---|"]
    own: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in read_rows(ROWS):
        pair = row["unchecked_s"], 100 * (row["checked_s"] / row["unchecked_s"] - 1)
        own.setdefault((row["model"], row["method"]), []).append(pair)
    for (model, method), pairs in own.items():
        ms = 1e3 * median(seconds for seconds, _ in pairs)
        share = middle([percent for _, percent in pairs])
        lines.append(f"| {model} | {method} | {ms:.1f} | {share:.1f} |")
    return {"shares": "\n".join(lines) + "\n"}


def middle(values: list[float], draws: int = 2000) -> Interval:
    """The median with its 95 % interval, by resampling rounds."""
    drawn = random.Random(0)
    found = sorted(median(drawn.choices(values, k=len(values))) for _ in range(draws))
    return Interval(median(values), found[draws * 25 // 1000], found[draws * 975 // 1000])
