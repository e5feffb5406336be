"""The results as Markdown: per set, accuracy and its gap to BP, paired by seed.

python -m benchmarks.accuracy.summary benchmarks/accuracy/*.jsonl
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.accuracy.configurations import BASELINE, RECIPES, SETS, Cut, Recipe, Set
from benchmarks.accuracy.training import Job
from benchmarks.intervals import Interval, half_width, mean
from benchmarks.pages import slug
from benchmarks.stored import Row, read_result, read_rows

FOLDER = Path(__file__).parent
TABLES = ("eight", "four", "twenty", "twenty-briefly")
"""Sets whose tables the page has as they are."""
FIRST = 5
"""So many seeds all ways have."""
GUESSING = 11.0
"""Percent: of ten classes, what no network that learns anything stays below."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One way at one cut, over seeds; accuracies in percent, gaps in points below BP.

    Seeds that end by guessing are counted and left out, unless all do.
    """

    way: str
    cut: Cut
    lags: tuple[int, ...]
    stale_share: float
    lr: float
    accuracies: Sequence[float]
    gaps: Sequence[float]
    """What BP of the same seed has more; one per seed that both have."""
    epochs: int
    seeds: int

    @property
    def counted(self) -> str:
        """The seeds in the means, and out of how many where some guess."""
        learned = len(self.accuracies)
        return f"{learned}" if learned == self.seeds else f"{learned} of {self.seeds}"

    @property
    def gap(self) -> float:
        return fmean(self.gaps) if self.gaps else float("nan")

    @property
    def half(self) -> float | None:
        """Of the 95 % interval of the gap; None where there is none."""
        return half_width(list(self.gaps))


def rows_in(paths: Iterable[Path]) -> list[Row]:
    """Runs that ended."""
    return [row for path in paths for row in read_rows(path) if "error" not in row]


def settings_in(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that can be compared: same network, epochs, batch, rate."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(Job.of(row).setting, []).append(row)
    return list(found.values())


def found_in(rows: Sequence[Row], of: Set) -> list[Found]:
    """Of rows that can be compared: what a set asks for, in its order, BP first."""
    jobs = [Job.of(row) for row in rows]
    base = dict(_by_seed(rows, jobs, BASELINE, Cut(stages=1)))
    made = []
    for cut in [Cut(stages=1), *of.cuts]:
        for way in [BASELINE] if cut.stages == 1 else of.ways:
            mine = dict(_by_seed(rows, jobs, way, cut))
            if not mine:
                continue
            learned = {seed: mine[seed] for seed in mine if mine[seed] > GUESSING} or mine
            row = next(r for r, j in zip(rows, jobs, strict=True) if _is(j, way, cut))
            shared = [seed for seed in sorted(learned) if seed in base]
            made.append(
                Found(
                    way=way,
                    cut=cut,
                    lags=tuple(row["lags"]),
                    stale_share=row["stale_share"],
                    lr=row["lr"],
                    accuracies=[learned[seed] for seed in sorted(learned)],
                    gaps=[base[seed] - learned[seed] for seed in shared],
                    epochs=row["epochs"],
                    seeds=len(mine),
                )
            )
    return made


def _by_seed(
    rows: Sequence[Row], jobs: Sequence[Job], way: str, cut: Cut
) -> Iterator[tuple[int, float]]:
    for row, job in zip(rows, jobs, strict=True):
        if _is(job, way, cut):
            for seed, accuracy in zip(job.seeds, row["accuracies"], strict=True):
                yield seed, 100 * accuracy


def _is(job: Job, way: str, cut: Cut) -> bool:
    return job.way == way and Cut(stages=job.stages, cuts=job.cuts, ppv=job.ppv) == cut


def of_set(rows: Sequence[Row], name: str) -> list[list[Found]]:
    """What a set asks for, per group of rows that can be compared, the most complete first."""
    of = SETS[name]
    recipe = RECIPES.get(of.network, Recipe())
    rates = {rate * recipe.lr for rate in of.rates}
    fitting = [
        row
        for row in rows
        if (row["network"], row["epochs"]) == (of.network, of.epochs) and row["lr"] in rates
    ]
    made = [found_in(comparable, of) for comparable in settings_in(fitting)]
    known = [found for found in made if any(summary.way != BASELINE for summary in found)]
    return sorted(known, key=len, reverse=True)


# ------------------------------------------------------------------------- facts


def stored_rows() -> list[Row]:
    return rows_in(sorted(FOLDER.glob("*.jsonl")))


def facts() -> Iterator[tuple[str, float | Interval]]:
    """Gaps in points below BP; "back" is what a correction takes off."""
    rows = stored_rows()
    for name, of in SETS.items():
        known: set[str] = set()
        for found in of_set(rows, name):
            for summary in found:
                key = f"{name}.{place_of(summary, of)}{slug(summary.way)}"
                if key not in known:
                    known.add(key)
                    yield from _facts_of(key, summary, found)
    briefly = [row for row in rows if (row["network"], row["epochs"]) == ("vgg16", 5)]
    for comparable in settings_in(briefly):
        for summary in found_in(comparable, SETS["vgg-16"]):
            yield from _facts_of(f"vgg-16-briefly.{slug(summary.way)}", summary, ())
    for way in ("BP, M=8", "BP, M=4", "1F1B, M=4 + spike"):
        yield f"statistics.{slug(way)}", gained(rows, way)
    speeds = read_result(FOLDER / "table-speed.json")["rows"]
    for name, row in speeds.items():
        yield f"speed.{slug(name)}", speeds[BASELINE]["ms"] / row["ms"]


def _facts_of(
    key: str, summary: Found, found: Sequence[Found]
) -> Iterator[tuple[str, float | Interval]]:
    yield f"{key}.accuracy", fmean(summary.accuracies)
    if summary.way == BASELINE:
        return
    yield key, mean(summary.gaps)
    yield f"{key}.stale", 100 * summary.stale_share
    if len(summary.gaps) > FIRST:
        yield f"{key}.first-seeds", fmean(summary.gaps[:FIRST])
    for other in found:
        if (other.way, other.cut) == (plain_of(summary.way), summary.cut):
            shared = list(zip(other.gaps, summary.gaps, strict=False))
            yield f"{key}.back", mean([before - after for before, after in shared])
            yield f"{key}.share-back", 100 * (1 - fmean(a for _, a in shared) / other.gap)


def plain_of(way: str) -> str | None:
    """The same without a correction or a synchronous end.

    >>> plain_of("1F1B + spike"), plain_of("1F1B, M=2 + spike"), plain_of("stale, half")
    ('1F1B, stash', '1F1B, M=2', 'stale, current')
    """
    plain = way.partition(" + ")[0].removesuffix(", tail").removesuffix(", half")
    if plain == way:
        return None
    return {"1F1B": "1F1B, stash", "stale": "stale, current"}.get(plain, plain)


def place_of(summary: Found, of: Set) -> str:
    """What tells the ways of a set apart where it has several cuts or rates."""
    if len(of.rates) > 1:
        return f"{summary.lr:g}."
    if len(of.cuts) == 1 or summary.way == BASELINE:
        return ""
    cut = summary.cut
    return f"{cut.ppv[0]}." if cut.ppv else f"{len(cut.cuts or ()) + 1}."


def gained(rows: Sequence[Row], way: str) -> Interval:
    """Points that slower running statistics are worth, by seed."""
    cut = Cut(stages=8)
    for comparable in settings_in(rows):
        jobs = [Job.of(row) for row in comparable]
        usual, slow = (
            dict(_by_seed(comparable, jobs, name, cut)) for name in (way, f"{way}, slow statistics")
        )
        if slow:
            return mean([slow[seed] - usual[seed] for seed in sorted(slow) if seed in usual])
    raise ValueError(f"no run has {way} with slow statistics")


def tables() -> dict[str, str]:
    rows = stored_rows()
    return {name: table(of_set(rows, name)[0]) for name in TABLES}


# ------------------------------------------------------------------------- Markdown


def text_of(rows: Sequence[Row]) -> str:
    parts = []
    for name, of in SETS.items():
        for found in of_set(rows, name):
            recipe = f"{of.network}, {found[0].epochs} epochs, learning rate {found[0].lr:g}"
            parts.append(f"### {name}: {of.question}\n\n{recipe}.\n\n{table(found)}")
    lengths = {(of.network, of.epochs) for of in SETS.values()}
    others = sum((row["network"], row["epochs"]) not in lengths for row in rows)
    if others:
        parts.append(f"{others} runs of other lengths than their sets' are not shown.")
    return "\n\n".join(parts) + "\n"


def table(found: Sequence[Found]) -> str:
    lines = [
        "| way | where | lag | accuracy % | points below BP | 95 % | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for summary in found:
        base = summary.way == BASELINE
        spread = f" ± {stdev(summary.accuracies):.2f}" if len(summary.accuracies) > 1 else ""
        half = summary.half
        cells = [
            summary.way,
            "" if base else str(summary.cut),
            str(max(summary.lags)),
            f"{fmean(summary.accuracies):.2f}{spread}",
            "" if base else f"{summary.gap:+.2f}",
            ""
            if base or half is None
            else f"{summary.gap - half:+.2f} to {summary.gap + half:+.2f}",
            summary.counted,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(text_of(rows_in(map(Path, sys.argv[1:]))), end="")
