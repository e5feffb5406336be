"""What simulating staleness costs: time per step over that of the plain loop, in the same round.

python -m benchmarks.simulator.summary benchmarks/simulator/results.json
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.intervals import Interval, ratio
from benchmarks.stored import read_result

FOLDER = Path(__file__).parent
FILES = {"": "results.json", "before.": "results-torch-2.11.json"}


def ratios(result: dict[str, Any]) -> dict[str, tuple[Interval, float]]:
    """By contestant: the mean over rounds, and the median."""
    rounds = result["seconds_per_step"]
    plain = [seconds["plain"] for seconds in rounds]
    return {
        name: (
            ratio([seconds[name] for seconds in rounds], plain),
            median(seconds[name] / seconds["plain"] for seconds in rounds),
        )
        for name in rounds[0]
        if name != "plain"
    }


def facts() -> Iterator[tuple[str, float | Interval]]:
    for prefix, file in FILES.items():
        for name, (mean, middle) in ratios(read_result(FOLDER / file)).items():
            yield f"{prefix}{name}", mean
            yield f"{prefix}{name}.median", middle


def table(result: dict[str, Any]) -> str:
    lines = ["| | times a plain loop, mean (95 %) | median | limit |", "|---" * 4 + "|"]
    for name, (mean, middle) in ratios(result).items():
        limit = result["limits"].get(name)
        limit = "" if limit is None else f"{limit:.2f}"
        lines.append(f"| `{name}` | {mean:.3f} | {middle:.3f} | {limit} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    return {"ratios": table(read_result(FOLDER / "results.json"))}


if __name__ == "__main__":
    print(table(read_result(Path(sys.argv[1]))))
