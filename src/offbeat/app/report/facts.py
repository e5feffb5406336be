"""What a stored run says, with every part optional."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Any

from offbeat.app.experiment import names_of
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings
from offbeat.registry import Choice

MOST_POINTS = 400
"""Points of a curve; a longer one is drawn through means of neighbours."""


@dataclass(frozen=True)
class Point:
    """One value of a curve."""

    epoch: float | None
    time_s: float | None
    value: float


@dataclass(frozen=True)
class AtStage:
    """What was counted at one stage of one replica: its memory, its waits, what its guard saw."""

    replica: int
    stage: int
    numbers: Mapping[str, float]


_PLACE = attrgetter("replica", "stage")


class Facts:
    """A run as the report reads it; None or empty wherever the run does not say."""

    def __init__(self, run: Run, label: str) -> None:
        self.run = run
        self.label = label
        self.config = mapping(run.config)
        self.summary = mapping(run.summary)

    # ---------------------------------------------------------------- what was asked for

    @property
    def method(self) -> str | None:
        return name_of(self._asked.get("method"))

    @property
    def method_in_full(self) -> str | None:
        """With its settings and corrections, as "auto" prints them."""
        chosen = [self._asked.get("method"), *listing(self._asked.get("correction"))]
        choices = [
            str(Choice(name, mapping(mapping(value).get("settings"))))
            for value in chosen
            if (name := name_of(value)) is not None
        ]
        return " + ".join(choices) or None

    @property
    def settings(self) -> dict[str, Any]:
        return mapping(mapping(self._asked.get("method")).get("settings"))

    @property
    def _asked(self) -> dict[str, Any]:
        """What decided the run: the configuration, or what "auto" made of it."""
        return self.config | mapping(self.config.get("plan"))

    @property
    def averaging(self) -> str | None:
        return name_of(self.config.get("averaging"))

    @property
    def model(self) -> str | None:
        return name_of(self.config.get("model"))

    def has_data_of(self, other: "Facts") -> bool:
        """As far as both say theirs: scores on different data have no difference."""
        ours, theirs = self.config.get("data"), other.config.get("data")
        return None in (ours, theirs) or ours == theirs

    @property
    def stages(self) -> int | None:
        return count(self.config.get("stages")) or len(self.lags) or None

    @property
    def replicas(self) -> int:
        return count(self.config.get("replicas")) or 1

    @property
    def in_turn(self) -> bool:
        """Whether several stages took turns in one process: time says nothing of a pipe then."""
        together = (self.stages or 1) * self.replicas > 1
        return together and count(self.config.get("processes")) == 1 and not self._on_streams

    @property
    def _on_streams(self) -> bool:
        return self.config.get("engine") == "streams"

    @property
    def machine(self) -> str:
        """What must be equal where times are compared, as far as the run says."""
        names = ("threads", "processes", "device", "engine")
        system = mapping(self.config.get("versions")).get("system")
        return json.dumps([system, *map(self.config.get, names)], default=str)

    @property
    def lags(self) -> tuple[int, ...]:
        """Declared lag per stage, in updates."""
        lags = map(whole, listing(self.config.get("lags")))
        return tuple(lag for lag in lags if lag is not None)

    @property
    def seed(self) -> int | None:
        return whole(self.config.get("seed"))

    @cached_property
    def case(self) -> str:
        """All that decided the run but its seed: runs of one case differ by chance alone."""
        names = (name for name in names_of("recipe", "run") if name != "seed")
        settings = {name: self._asked.get(name) for name in names}
        return json.dumps(settings, sort_keys=True, default=str)

    @property
    def synchronous(self) -> bool:
        """Plain training: no stage lags, and replicas apply the mean of their gradients."""
        averaging = "all-reduce" if self.replicas == 1 else self.averaging or "all-reduce"
        together = averaging.lower().replace("-", "") == "allreduce"
        return (self.method or "").lower() == "synchronous" and together and not any(self.lags)

    # ---------------------------------------------------------------- what came out

    @property
    def status(self) -> str | None:
        """finished, interrupted or failed; None for a run that was killed or is :attr:`running`."""
        ends = self._lines("end")
        status = self.summary.get("status") or (ends[-1].get("status") if ends else None)
        return None if status is None else str(status)

    @cached_property
    def running(self) -> bool:
        """Whether it goes on, as far as this machine can see."""
        return self.status is None and self.run.goes_on

    @property
    def accuracy(self) -> float | None:
        return self._final("accuracy")

    @property
    def loss(self) -> float | None:
        return self._final("loss")

    def _final(self, key: str) -> float | None:
        """From the summary, or from the last evaluation of a run that has none."""
        if key in self.summary:
            return number(self.summary[key])
        evaluations = self._lines("evaluation")
        return number(evaluations[-1].get(key)) if evaluations else None

    @property
    def steps(self) -> int | None:
        if "steps" in self.summary:
            return whole(self.summary["steps"])
        return max((s for line in self._dicts if (s := whole(line.get("step")))), default=None)

    @property
    def time_s(self) -> float | None:
        if "time_s" in self.summary:
            return number(self.summary["time_s"])
        return max((t for line in self._dicts if (t := number(line.get("time_s")))), default=None)

    @property
    def step_s(self) -> float | None:
        """Median time from update to update of the last stage, by the ledger.

        So without the first step, and evaluations and pauses hardly count.
        """
        updates = [e for e in self.ledger or () if (e.kind, e.replica) == ("U", 0)]
        last = max((e.stage for e in updates), default=0)
        times = [b - a for a, b in pairwise(e.end_s for e in updates if e.stage == last)]
        return median(times) if times else None

    @property
    def rows_per_s(self) -> float | None:
        return number(self.summary.get("rows_per_s"))

    @property
    def busy_share(self) -> tuple[float, ...]:
        shares = map(number, listing(self.summary.get("busy_share")))
        return tuple(share for share in shares if share is not None)

    @property
    def memory(self) -> tuple[AtStage, ...]:
        """Before the last drain; one entry per stage of the first replica, then of the next."""
        entries = [_numbers(mapping(entry)) for entry in listing(self.summary.get("memory"))]
        stages = self.stages or max(1, len(entries) // self.replicas)
        return tuple(AtStage(*divmod(place, stages), n) for place, n in enumerate(entries))

    @cached_property
    def sizes(self) -> list[tuple[float, float]]:
        """Per stage its parameters and its layers; empty where the run does not say them."""
        known = [entry.numbers for entry in self.memory if entry.replica == 0]
        sizes = [(n.get("parameters", 0.0), n.get("layers", 0.0)) for n in known]
        return sizes if sizes and all(layers for _, layers in sizes) else []

    @property
    def stale_share(self) -> float | None:
        """Which share of all weights is in stages that lag."""
        sizes, lags = self.sizes, self.lags
        total = sum(parameters for parameters, _ in sizes)
        if not total or len(lags) != len(sizes):
            return None
        return sum(n for (n, _), lag in zip(sizes, lags, strict=True) if lag) / total

    @cached_property
    def guarded(self) -> tuple[AtStage, ...]:
        """Empty where the run had no guards."""
        return self._by_place("guards")

    @cached_property
    def waits(self) -> tuple[AtStage, ...]:
        """How long stages stood still for averages; empty where none were merged."""
        return self._by_place("waits")

    def _by_place(self, key: str) -> tuple[AtStage, ...]:
        """A part of the summary whose keys read replica/stage."""
        entries = []
        for place, value in mapping(self.summary.get(key)).items():
            replica, _, stage = (whole(word) or 0 for word in place.partition("/"))
            entries.append(AtStage(replica, stage, _numbers(mapping(value))))
        return tuple(sorted(entries, key=_PLACE))

    @cached_property
    def ledger(self) -> Ledger | None:
        """The last actions; None if there are none, or if the file is damaged."""
        with suppress(ConfigurationError):
            return self.run.ledger() or None
        return None

    @cached_property
    def readings(self) -> Readings | None:
        """What the monitor read; None if there was none, or if the file is damaged."""
        with suppress(ConfigurationError):
            return self.run.readings()
        return None

    @cached_property
    def lag_counts(self) -> dict[int, dict[int, int]]:
        """Per stage, how many micro-batches had which lag."""
        counted = {
            stage: {
                lag: times
                for name, value in mapping(counts).items()
                if (lag := whole(name)) is not None and (times := count(value))
            }
            for key, counts in mapping(self.summary.get("lags")).items()
            if (stage := whole(key)) is not None
        }
        return {stage: counted[stage] for stage in sorted(counted) if counted[stage]}

    # ---------------------------------------------------------------- curves

    @cached_property
    def training_loss(self) -> list[Point]:
        return self._curve("step", "loss")

    @cached_property
    def test_loss(self) -> list[Point]:
        return self._curve("evaluation", "loss")

    @cached_property
    def test_accuracy(self) -> list[Point]:
        return self._curve("evaluation", "accuracy")

    @property
    def diverged(self) -> bool:
        """Whether the test loss of the end is no finite number."""
        loss = self.summary.get("loss")
        return isinstance(loss, float) and not math.isfinite(loss)

    def recipe_unlike(self, other: "Facts") -> list[str]:
        """Settings that have nothing to do with staleness, and differ: this run's and the other's.

        Only what both say; a run may be older than a setting.
        """
        both = [name for name in names_of("recipe") if name in self.config and name in other.config]
        pairs = [(name, self.config[name], other.config[name]) for name in both]
        return [
            f"{name} {name_of(ours) or ours} ({name_of(theirs) or theirs})"
            for name, ours, theirs in pairs
            if ours != theirs
        ]

    @cached_property
    def diverged_at(self) -> int | None:
        """The first step whose loss was not a finite number."""
        for line in self._lines("step"):
            loss = line.get("loss")
            if isinstance(loss, float) and not math.isfinite(loss):
                return whole(line.get("step"))
        return None

    @property
    def _dicts(self) -> list[dict[str, Any]]:
        return [line for line in self.run.metrics if isinstance(line, dict)]

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self._dicts if line.get("kind") == kind]

    def _curve(self, kind: str, key: str) -> list[Point]:
        points = [
            Point(number(line.get("epoch")), number(line.get("time_s")), value)
            for line in self._lines(kind)
            if (value := number(line.get(key))) is not None
        ]
        return thinned(points, MOST_POINTS)


def _numbers(words: Mapping[str, object]) -> dict[str, float]:
    return {key: n for key, value in words.items() if (n := number(value)) is not None}


def facts_of(runs: Sequence[Run]) -> list[Facts]:
    """The runs with labels that tell them apart: folder names, with parents where they repeat."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        seen[name] += 1
        labels.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return [Facts(run, label) for run, label in zip(runs, labels, strict=True)]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points: means of equal shares of them."""
    if len(points) <= most:
        return list(points)
    edges = [round(place * len(points) / most) for place in range(most + 1)]
    shares = [points[low:high] for low, high in pairwise(edges)]
    return [replace(s[-1], value=math.fsum(p.value for p in s) / len(s)) for s in shares]


# Values from JSON that anybody may have edited: the kind that is wanted, or nothing.


def mapping(value: object) -> dict[str, Any]:
    """A dictionary with names as keys; empty for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def listing(value: object) -> list[Any]:
    """A list; empty for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """An integer, also one written as text: JSON's keys are."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    exact = number(value)
    return int(exact) if exact is not None and exact == int(exact) else None


def count(value: object) -> int | None:
    """An integer of at least one, or None."""
    exact = whole(value)
    return exact if exact is not None and exact >= 1 else None


def name_of(value: object) -> str | None:
    """A name, given alone or as ``{"name": ...}``."""
    name = value if isinstance(value, str) else mapping(value).get("name")
    return None if name is None else str(name)
