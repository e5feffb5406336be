"""Runs and configurations side by side, each with its gap to the synchronous runs that it may be
compared with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev

from offbeat.app.intervals import half_width
from offbeat.app.report import words
from offbeat.app.report.cases import Case, in_words
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, fold, join, note, scale, swatch, table


@dataclass(frozen=True)
class Gap:
    """How far a run ends from synchronous training; above 0 is more accuracy, or more loss."""

    value: float | None
    base: str
    """What it is compared with; empty where there is nothing."""
    paired: bool = False
    """Whether that is one run, of the same seed; otherwise it is a mean."""
    notes: list[str] = field(default_factory=list)

    def in_words(self, by_accuracy: bool) -> str:
        if self.value is None:
            return self.base or words.MISSING
        return f"{_mean([self.value], by_accuracy, '+')} to {self.base}"


@dataclass(frozen=True)
class Standing:
    """A configuration's gap: of pairs of seeds with their mean and 95 % interval, or of means."""

    case: Case
    gaps: list[float]
    paired: bool
    baseline: bool = False

    @property
    def mean(self) -> float | None:
        return fmean(self.gaps) if self.gaps else None

    @cached_property
    def half(self) -> float | None:
        """Half of the interval; None where there are no two pairs of different seeds."""
        return half_width(self.gaps) if self.paired else None


class Comparison:
    """All runs of a page against the synchronous ones among them."""

    def __init__(self, facts: Sequence[Facts], cases: Sequence[Case]) -> None:
        self.facts, self.cases = facts, cases
        plain = [run for run in facts if run.synchronous]
        self.by_accuracy = any(run.accuracy is not None for run in plain)
        self.plain = [run for run in plain if scores([run], self.by_accuracy)]
        self.gaps = [self._gap(run) for run in facts]

    def _gap(self, run: Facts) -> Gap:
        """To that of the nearest recipe and of the run's seed, or else the means of all seeds."""
        of_data = [other for other in self.plain if run.has_data_of(other)]
        if not of_data:
            return Gap(
                None, "", notes=[f"{run.label} has no gap: no synchronous run has its data."]
            )
        unlike = min((run.recipe_unlike(other) for other in of_data), key=len)
        rivals = [other for other in of_data if run.recipe_unlike(other) == unlike]
        by_accuracy = self.by_accuracy
        own = [o for o in self.facts if o.case == run.case and scores([o], by_accuracy)]
        if run in rivals or run not in own:
            return Gap(None, "baseline" if run in rivals else "")
        notes = []
        # An older run may not say its seed.
        twins = [o for o in rivals if None in (o.seed, run.seed) or o.seed == run.seed]
        if unlike:
            base = (twins or rivals)[0].label
            notes.append(
                f"{run.label} and {base} differ in more than staleness: {', '.join(unlike)}."
            )
        compared, base = ([run], twins[0].label) if twins else (own, "the mean")
        ours, theirs = (scores(runs, by_accuracy) for runs in (compared, twins[:1] or rivals))
        if not twins:
            notes.append(
                f"{in_words(run)}: not every seed has a synchronous run, so means are compared:"
                f" {_mean(ours, by_accuracy)} (seeds {_seeds(own)}) with"
                f" {_mean(theirs, by_accuracy)} (seeds {_seeds(rivals)}); part of that is chance."
            )
        return Gap(fmean(ours) - fmean(theirs), base, bool(twins), notes)

    def standing(self, case: Case) -> Standing:
        """Pairs of seeds where there are any: each seed counts once, however often it was run."""
        own = [
            (run, gap) for run, gap in zip(self.facts, self.gaps, strict=True) if run in case.scored
        ]
        if any(gap.base == "baseline" for _, gap in own):
            return Standing(case, [], paired=False, baseline=True)
        pairs = {run.seed: gap.value for run, gap in own if gap.value is not None and gap.paired}
        if pairs:
            return Standing(case, list(pairs.values()), paired=None not in pairs)
        means = [gap.value for _, gap in own if gap.value is not None]
        return Standing(case, means[:1], paired=False)

    def show(self) -> Markup:
        seeds = any(len(case.runs) > 1 for case in self.cases)
        runs = self._of_runs()
        several = [self._of_cases(), fold("Every single run", runs)] if seeds else [runs]
        notes = dict.fromkeys(text for gap in self.gaps for text in gap.notes)
        if not self.plain:
            notes = {"None of the runs is synchronous with a score, so no gap is given.": None}
        return join([*several, *map(note, notes)])

    @property
    def _unit(self) -> str:
        return "points" if self.by_accuracy else "in loss"

    def _of_cases(self) -> Markup:
        standings = [self.standing(case) for case in self.cases]
        ends = [
            end for s in standings if s.mean is not None
            for end in (s.mean - (s.half or 0), s.mean + (s.half or 0), *s.gaps)
        ]  # fmt: skip
        low, high = min([0.0, *ends]), max([0.0, *ends])
        head = (
            *("configuration", "runs", "lag per stage", "accuracy", "test loss"),
            *(f"mean gap, {self._unit}", "each seed, mean and 95 % interval; line: BP"),
            "time per step",
        )
        body = [
            (
                join([swatch(s.case.place), " ", s.case.label]),
                len(s.case.runs),
                words.listed(s.case.first.lags),
                _spread(s.case.accuracies, True),
                _spread(s.case.losses, False),
                self._gap_words(s),
                self._gap_picture(s, low, high),
                words.seconds(s.case.step_s),
            )
            for s in standings
        ]
        return table("The configurations, over their seeds", head, body, class_="cases")

    def _gap_words(self, standing: Standing) -> str:
        if standing.baseline:
            return "baseline"
        if standing.mean is None:
            return words.MISSING
        text = _mean([standing.mean], self.by_accuracy, "+")
        if standing.half is None:
            return f"{text} ({'one pair' if standing.paired else 'of means'})"
        factor, digits = (100, 1) if self.by_accuracy else (1, 4)
        ends = (standing.mean - standing.half, standing.mean + standing.half)
        return f"{text} ({' to '.join(f'{factor * end:+z.{digits}f}' for end in ends)})"

    def _gap_picture(self, standing: Standing, low: float, high: float) -> Markup | str:
        if standing.mean is None or not high > low:
            return ""
        half = standing.half
        bar = None if half is None else (standing.mean - half, standing.mean + half)
        return scale(low, high, standing.gaps, bar, mean=standing.mean, line=0.0)

    def _of_runs(self) -> Markup:
        head = (
            *("run", "method", "seed", "lag per stage", "accuracy"),
            *(f"gap, {self._unit}", "test loss", "time per step", "rows/s", "end"),
        )
        places = {id(run): case.place for case in self.cases for run in case.runs}
        body = [
            (
                join([swatch(places[id(run)]), " ", run.label]),
                in_words(run),
                _seeds([run]),
                words.listed(run.lags),
                words.percent(run.accuracy),
                gap.in_words(self.by_accuracy),
                words.number(run.loss),
                words.seconds(run.step_s),
                words.number(run.rows_per_s),
                run.status or ("still running" if run.running else "not recorded"),
            )
            for run, gap in zip(self.facts, self.gaps, strict=True)
        ]
        return table("The runs side by side", head, body, class_="side")


def scores(runs: Sequence[Facts], by_accuracy: bool) -> list[float]:
    values = (run.accuracy if by_accuracy else run.loss for run in runs)
    return [value for value in values if value is not None]


def _mean(values: Sequence[float], by_accuracy: bool, sign: str = "") -> str:
    """With one standard deviation where there is one."""
    factor, digits = (100, 1) if by_accuracy else (1, 4)
    spread = f" \N{PLUS-MINUS SIGN} {factor * stdev(values):.{digits}f}" if values[1:] else ""
    return f"{factor * fmean(values):{sign}z.{digits}f}{spread}"


def _spread(values: Sequence[float], by_accuracy: bool) -> str:
    if not values:
        return words.MISSING
    return _mean(values, by_accuracy) + ("\N{NO-BREAK SPACE}%" if by_accuracy else "")


def _seeds(runs: Sequence[Facts]) -> str:
    return words.listed([words.MISSING if run.seed is None else run.seed for run in runs])
