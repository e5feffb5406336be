"""The results as Markdown: per set, validation loss and its gap to BP, paired by seed.

python -m benchmarks.language.summary benchmarks/language/results.jsonl
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.intervals import Interval, half_width, mean
from benchmarks.language.configurations import (
    BASELINE,
    SETS,
    TUNE,
    Comparison,
    Set,
)
from benchmarks.language.rates import best_rates, losses_of, tuned
from benchmarks.language.run import rows_in
from benchmarks.language.training import Job
from benchmarks.pages import slug
from benchmarks.stored import Row

RESULTS = Path(__file__).with_name("results.jsonl")
TARGET = 0.005
"""Nats behind BP that count as nothing."""
CURVE, EXTRAPOLATED = "curve", "BP + extrapolate"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One way with one optimizer at one learning rate, over seeds; diverged runs are infinite."""

    way: str
    optimizer: str
    lr: float
    lags: tuple[int, ...]
    losses: Sequence[float]
    gaps: Sequence[float]
    """To BP at its best rate, one per seed that both have."""

    @property
    def gap(self) -> float:
        """The mean; not a number where there is no pair."""
        return fmean(self.gaps) if self.gaps else math.nan

    @property
    def half(self) -> float | None:
        """Of the 95 % interval of the gap; None where there is none."""
        return half_width(list(self.gaps)) if all(map(math.isfinite, self.gaps)) else None


def settings_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that can be compared, those with the most runs first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(Job.of(row).setting, []).append(row)
    return sorted(found.values(), key=len, reverse=True)


def found_in(rows: Sequence[Row], of: Set) -> list[Found]:
    """In the order of the set, rate by rate, the largest first; BP at its best rate."""
    best = best_rates(rows)
    made = []
    for one in of.comparisons:
        if one.optimizer not in best:
            continue
        rates = {row["lr"] for row in rows if (row["way"], row["optimizer"]) == _names(one)}
        if one.way == BASELINE:
            rates &= {best[one.optimizer]}
        made += [_found(rows, one, lr, best[one.optimizer]) for lr in sorted(rates, reverse=True)]
    return made


def best_of_rates(found: Iterable[Found]) -> list[Found]:
    """Each way and optimizer once, at the rate with which it ended lowest."""
    made: dict[tuple[str, str], Found] = {}
    for summary in found:
        key = (summary.way, summary.optimizer)
        if key not in made or fmean(summary.losses) < fmean(made[key].losses):
            made[key] = summary
    return list(made.values())


def _found(rows: Sequence[Row], of: Comparison, lr: float, best: float) -> Found:
    mine = [r for r in rows if _is(r, of.way, of.optimizer, lr)]
    losses = losses_of(mine)
    base = losses_of(r for r in rows if _is(r, BASELINE, of.optimizer, best))
    return Found(
        way=of.way,
        optimizer=of.optimizer,
        lr=lr,
        lags=tuple(mine[0]["lags"]),
        losses=[losses[seed] for seed in sorted(losses)],
        gaps=[losses[seed] - base[seed] for seed in sorted(losses) if seed in base],
    )


def _names(of: Comparison) -> tuple[str, str]:
    return of.way, of.optimizer


def _is(row: Row, way: str, optimizer: str, lr: float) -> bool:
    return (row["way"], row["optimizer"], row["lr"]) == (way, optimizer, lr)


# ------------------------------------------------------------------------- facts


def facts() -> Iterator[tuple[str, float | Interval]]:
    """Gaps in nats above BP, at BP's rate or a quarter of it; delay curves at the best rate."""
    rows = settings_of(rows_in(RESULTS))[0]
    for name in ("target", "lag", "between"):
        found = found_in(rows, SETS[name])
        for summary in found:
            optimizer = slug(summary.optimizer)
            key = f"{name}.{optimizer}.{slug(summary.way)}"
            if summary.way == BASELINE:
                bp = summary
                yield f"{key}.loss", fmean(summary.losses)
            elif summary.lr == bp.lr:
                yield key, mean(summary.gaps)
            else:
                yield f"{key}.slower", mean(summary.gaps)
            if summary.way == EXTRAPOLATED:
                looking = summary
            elif name == "target" and summary.way != BASELINE:
                pairs = zip(summary.gaps, looking.gaps, strict=True)
                yield f"{key}.of.extrapolated", mean([ours - bps for ours, bps in pairs])
    yield "lag.adamw.most-back", most_back(found_in(rows, SETS["lag"]), "adamw")
    curve = found_in(rows, SETS[CURVE])
    for summary in best_of_rates(curve):
        optimizer = slug(summary.optimizer)
        if summary.way == BASELINE:
            yield f"{CURVE}.{optimizer}.bp.loss", fmean(summary.losses)
        elif math.isfinite(summary.gap):
            yield f"{CURVE}.{optimizer}.{max(summary.lags)}", mean(summary.gaps)


def most_back(found: Sequence[Found], optimizer: str) -> float:
    """Nats that any correction takes off the gap of whole batches, by the mean and at BP's rate."""
    best = max(summary.lr for summary in found if summary.optimizer == optimizer)
    mine = {s.way: s.gap for s in found if (s.optimizer, s.lr) == (optimizer, best)}
    return max(mine[f"{way.split(' + ')[0]}, stash"] - mine[way] for way in mine if " + " in way)


def tables() -> dict[str, str]:
    return {"all": text_of(rows_in(RESULTS)).strip()}


# ------------------------------------------------------------------------- Markdown


def text_of(rows: Sequence[Row]) -> str:
    parts = []
    for comparable in settings_of(rows):
        job = Job.of(comparable[0])
        parts.append(
            f"{job.text}: {job.updates} updates of {job.rows} rows of {job.context} bytes, width"
            f" {job.width}, dropout {job.dropout:g},"
            f" {job.precision}; {len(comparable)} runs. Losses in nats per byte, gaps to BP of the"
            " same optimizer and seed at its best rate, with 95 % intervals."
        )
        parts.append(f"### {TUNE}: {SETS[TUNE].question}\n\n{tuning_table(comparable)}")
        for name, of in SETS.items():
            found = found_in(comparable, of)
            if name != TUNE and any(summary.way != BASELINE for summary in found):
                table = curve_table(found) if name == CURVE else gap_table(found)
                parts.append(f"### {name}: {of.question}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def tuning_table(rows: Sequence[Row]) -> str:
    lines = ["| optimizer | learning rates: loss of BP | chosen |", "|---|---|---|"]
    best = best_rates(rows)
    for optimizer, losses in tuned(rows).items():
        cells = [f"{lr:g}: {_loss(losses[lr])}" for lr in sorted(losses)]
        chosen = f"{best[optimizer]:g}" if optimizer in best else "none"
        edge = " (at the edge)" if best.get(optimizer) in (min(losses), max(losses)) else ""
        lines.append(f"| {optimizer} | {', '.join(cells)} | {chosen}{edge} |")
    return "\n".join(lines)


def gap_table(found: Sequence[Found]) -> str:
    lines = [
        f"| optimizer | way | lag | loss | gap to BP | at most {TARGET} | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for summary in found:
        base = summary.way == BASELINE
        cells = [
            f"{summary.optimizer}, {summary.lr:g}",
            summary.way,
            str(max(summary.lags)),
            _losses(summary.losses),
            "" if base else _gap(summary),
            "" if base else verdict(summary),
            str(len(summary.losses)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curve_table(found: Sequence[Found]) -> str:
    """A line per optimizer and rate, a column per delay."""
    delays = sorted({max(summary.lags) for summary in found if summary.way != BASELINE})
    lines = [
        "| optimizer | " + " | ".join(f"delay {delay}" for delay in delays) + " |",
        "|---" * (len(delays) + 1) + "|",
    ]
    delayed = [summary for summary in found if summary.way != BASELINE]
    for optimizer, lr in dict.fromkeys((summary.optimizer, summary.lr) for summary in delayed):
        of_line = {
            max(summary.lags): summary
            for summary in delayed
            if (summary.optimizer, summary.lr) == (optimizer, lr)
        }
        cells = [_gap(of_line[delay]) if delay in of_line else "" for delay in delays]
        lines.append(f"| {optimizer}, {lr:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(summary: Found) -> str:
    """Whether the gap is small enough: for certain, by its mean alone, or not."""
    if not summary.gap <= TARGET:
        return "no"
    half = summary.half
    return "yes" if half is not None and summary.gap + half <= TARGET else "by the mean"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def _losses(losses: Sequence[float]) -> str:
    diverged = sum(not math.isfinite(loss) for loss in losses)
    if diverged:
        return f"{diverged} of {len(losses)} diverged"
    spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{fmean(losses):.4f}{spread}"


def _gap(summary: Found) -> str:
    gap, half = summary.gap, summary.half
    if math.isnan(gap):
        return "no pair"
    if not math.isfinite(gap):
        return "diverged"
    if half is None:
        return f"{gap:+.4f}"
    return f"{gap:+.4f} ({gap - half:+.4f} to {gap + half:+.4f})"


if __name__ == "__main__":
    print(text_of(rows_in(Path(sys.argv[1]))), end="")
