"""The results in numbers: per configuration, over seeds, and seed by seed against AllReduce."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.averaging.configurations import BASELINE, CONFIGURATIONS
from benchmarks.intervals import Interval, half_width, mean
from benchmarks.pages import slug
from benchmarks.stored import Row, read_rows

RESULTS = Path(__file__).with_name("results.jsonl")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One configuration at one learning rate; accuracies in percent."""

    name: str
    kept: float | None
    accuracies: list[float]
    replica: list[float]
    gaps: list[float]
    """To AllReduce, in points, one per seed that both have."""


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


def facts() -> Iterator[tuple[str, float | Interval]]:
    """Gaps to AllReduce, and what a merge that keeps all progress brings, in points."""
    (comparable,) = groups(read_rows(RESULTS))
    found = {summary.name: summary for summary in summaries(comparable)}
    for name, summary in found.items():
        yield f"{slug(name)}.accuracy", fmean(summary.accuracies)
        if name == BASELINE:
            continue
        yield slug(name), mean(summary.gaps)
        yield f"{slug(name)}.over-localsgd", _more(summary, found["LocalSGD(4)"])
        dropping = name.replace(", progress=1)", ")")
        if dropping != name:
            yield f"{slug(name)}.over-authors", _more(summary, found[dropping])


def _more(ours: Summary, theirs: Summary) -> Interval:
    return mean([own - other for own, other in zip(ours.gaps, theirs.gaps, strict=True)])


def tables() -> dict[str, str]:
    (comparable,) = groups(read_rows(RESULTS))
    return {"gaps": _rows_of(comparable)}


def table(rows: list[Row]) -> str:
    return "\n\n".join(map(_table, groups(rows)))


def _table(rows: list[Row]) -> str:
    first = rows[0]
    setting = first["setting"]
    return (
        f"{_model(setting['model'])}, {setting['rows']} training images, {setting['epochs']}"
        f" epochs, {setting['replicas']} replicas of {setting['rows_per_replica']} rows,"
        f" learning rate {first['lr']}; {first['test_rows']} test images.\n\n{_rows_of(rows)}"
    )


def _rows_of(rows: list[Row]) -> str:
    lines = [
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
