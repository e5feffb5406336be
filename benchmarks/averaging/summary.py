"""The results in numbers: per configuration, over seeds, and seed by seed against AllReduce."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.averaging.configurations import BASELINE, CONFIGURATIONS

Row = dict[str, Any]

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of 1, 2, ... degrees of freedom: 95 % lie within so many standard errors."""
NORMAL = 1.959964


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One configuration at one learning rate; accuracies in percent."""

    name: str
    kept: float | None
    accuracies: list[float]
    replica: list[float]
    gaps: list[float]
    """To AllReduce, in points, one per seed that both have."""


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def setting_words(row: Row) -> str:
    """What rows must share to be compared; earlier rows also say how steps were replayed."""
    return json.dumps({k: v for k, v in row["setting"].items() if k != "replay"}, sort_keys=True)


def key_of(row: Row) -> tuple[str, int, str, float]:
    """What makes a run the same run again."""
    return row["configuration"], row["seed"], setting_words(row), row["lr"]


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that can be compared: one setting, one learning rate."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((setting_words(row), row["lr"]), []).append(row)
    return list(found.values())


def summaries(rows: list[Row]) -> list[Summary]:
    """Of rows that can be compared, in the order of the list of configurations."""
    base = {row["seed"]: row["accuracy"] for row in rows if row["configuration"] == BASELINE}
    found = []
    for name, configuration in CONFIGURATIONS.items():
        mine = sorted(
            (row for row in rows if row["configuration"] == name), key=lambda row: row["seed"]
        )
        if mine:
            paired = [row for row in mine if row["seed"] in base]
            found.append(
                Summary(
                    name=name,
                    kept=configuration.kept,
                    accuracies=[100 * row["accuracy"] for row in mine],
                    replica=[100 * row["replica_accuracy"] for row in mine],
                    gaps=[100 * (row["accuracy"] - base[row["seed"]]) for row in paired],
                )
            )
    return found


def half_width(values: list[float]) -> float | None:
    """Of the 95 % interval of the mean, by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    return student(freedom) * stdev(values) / math.sqrt(len(values))


def student(freedom: int) -> float:
    """Student's t; beyond the table by its series, which has three digits right from there on.

    >>> round(student(20), 3), round(student(60), 3)
    (2.086, 2.0)
    """
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def table(rows: list[Row]) -> str:
    return "\n\n".join(map(_table, groups(rows)))


def _table(rows: list[Row]) -> str:
    first = rows[0]
    setting = first["setting"]
    lines = [
        f"{_model(setting['model'])}, {setting['rows']} training images, {setting['epochs']}"
        f" epochs, {setting['replicas']} replicas of {setting['rows_per_replica']} rows,"
        f" learning rate {first['lr']}; {first['test_rows']} test images.",
        "",
        "| configuration | progress kept | average, % | replica 0, % | gap to AllReduce, points |"
        " seeds |",
        "|---|---|---|---|---|---|",
    ]
    for summary in summaries(rows):
        kept = "" if summary.kept is None else f"{summary.kept:.3g}"
        cells = [
            summary.name,
            kept,
            _spread(summary.accuracies),
            _spread(summary.replica),
            "" if summary.name == BASELINE else _interval(summary.gaps),
            str(len(summary.accuracies)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _model(name: str) -> str:
    return name if name == "cnn" else f"ResNet-{name}"


def _spread(values: list[float]) -> str:
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{spread}"


def _interval(values: list[float]) -> str:
    if not values:
        return "no pair"
    half = half_width(values)
    mean = fmean(values)
    if half is None:
        return f"{mean:+.2f}"
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
