"""Runs that differ by their seed alone, taken together: a reader compares configurations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from offbeat.app.experiment import names_of
from offbeat.app.report import words
from offbeat.app.report.facts import Facts, Point, name_of
from offbeat.app.report.markup import Markup, fold, join, swatch, tag

MOST_OPEN = 3
"""Configurations; with more of them a page is folded."""
MOST_DIFFERENCES = 3
"""Settings in the name of a configuration that are there to tell it from another."""


@dataclass(frozen=True)
class Case:
    """A configuration with its runs, one per seed."""

    place: int
    """Among all of the page: it decides colour and dashes."""
    label: str
    runs: tuple[Facts, ...]

    @property
    def first(self) -> Facts:
        return self.runs[0]

    @cached_property
    def scored(self) -> list[Facts]:
        """Those whose scores count: the finished ones, where there are any."""
        finished = [run for run in self.runs if run.status == "finished"]
        return finished or list(self.runs)

    @cached_property
    def accuracies(self) -> list[float]:
        return [run.accuracy for run in self.scored if run.accuracy is not None]

    @cached_property
    def losses(self) -> list[float]:
        return [run.loss for run in self.scored if run.loss is not None]

    @cached_property
    def step_s(self) -> float | None:
        times = [run.step_s for run in self.runs if run.step_s is not None]
        return fmean(times) if times else None

    def curve(self, key: str) -> "Curve":
        return Curve.of([getattr(run, key) for run in self.runs])


@dataclass(frozen=True)
class Curve:
    """The mean of some runs point by point, with the lowest and the highest of them."""

    points: list[Point]
    low: list[float]
    high: list[float]
    runs: list[int]
    """How many runs have a point there: one may have ended before the others."""

    @classmethod
    def of(cls, curves: Sequence[Sequence[Point]]) -> "Curve":
        """Points of one epoch belong together, or of one place where a run names no epochs."""
        together: dict[float, list[Point]] = {}
        for points in curves:
            for place, point in enumerate(points):
                key = float(place) if point.epoch is None else point.epoch
                together.setdefault(key, []).append(point)
        keys = sorted(together)
        groups = [together[key] for key in keys]
        return cls(
            [_mean(points) for points in groups],
            [min(point.value for point in points) for points in groups],
            [max(point.value for point in points) for points in groups],
            [len(points) for points in groups],
        )


def _mean(points: Sequence[Point]) -> Point:
    times = [point.time_s for point in points if point.time_s is not None]
    value = fmean(point.value for point in points)
    return Point(points[0].epoch, fmean(times) if times else None, value)


def cases_of(facts: Sequence[Facts]) -> list[Case]:
    """The configurations in the order of their first runs, each with a name of its own."""
    groups: dict[str, list[Facts]] = {}
    for run in facts:
        groups.setdefault(run.case, []).append(run)
    every = list(groups.values())
    names = [_name(runs, every) for runs in every]
    labels = [
        f"{n} ({names[:k].count(n) + 1})" if n in names[:k] else n for k, n in enumerate(names)
    ]
    return [
        Case(k, label, tuple(runs))
        for k, (label, runs) in enumerate(zip(labels, every, strict=True))
    ]


def _name(runs: Sequence[Facts], every: Sequence[Sequence[Facts]]) -> str:
    """Of one run its folder's; of several what they were asked for."""
    if len(runs) == 1:
        return runs[0].label
    first = runs[0]
    alike = [
        o[0] for o in every if o is not runs and len(o) > 1 and in_words(o[0]) == in_words(first)
    ]
    if not alike:
        return in_words(first)
    own = [
        f"{name}={_plain(first.config.get(name))}"
        for name in names_of("recipe", "run")
        if name != "seed" and any(o.config.get(name) != first.config.get(name) for o in alike)
    ]
    return ", ".join([in_words(first), *own[:MOST_DIFFERENCES]])


def _plain(value: object) -> str:
    return name_of(value) or str(value)


def in_words(run: Facts) -> str:
    """What a run is, in a few words: method, stages, replicas."""
    text = run.method_in_full or words.MISSING
    text += f", {words.plural(run.stages, 'stage')}" if run.stages else ""
    if run.replicas > 1:
        text += f", {run.replicas} replicas"
        text += f", {run.averaging}" if run.averaging else ""
    return text


def per_case(
    cases: Sequence[Case],
    part: Callable[[Facts], object],
    digest: Callable[[Facts], str] | None = None,
) -> Markup:
    """A part of every run: of one alone as it is; of several folded under their names, with a few
    words of each that say whether it is worth opening."""
    if len(cases) == 1 and len(cases[0].runs) == 1:
        return tag("div", part(cases[0].first), class_="run")
    return join(_folded(case, part, digest, len(cases) <= MOST_OPEN) for case in cases)


def _folded(
    case: Case, part: Callable[[Facts], object], digest: Callable[[Facts], str] | None, open_: bool
) -> Markup:
    def heading(name: object, run: Facts) -> Markup:
        told = digest(run) if digest is not None else ""
        return join([name, tag("span", f" {told}", class_="note") if told else None])

    name = join([swatch(case.place), tag("b", case.label)])
    if len(case.runs) > 1:
        name = join([name, f": {case.first.label}"])
    others = [fold(heading(run.label, run), part(run)) for run in case.runs[1:]]
    content = tag("div", part(case.first), *others, class_="run")
    return fold(heading(name, case.first), content, open_=open_)
