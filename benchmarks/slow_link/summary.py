"""Numbers from raw results: what is printed, tabulated and drawn is computed here and nowhere else.

The formula: a round of ``every`` steps takes ``every * t_step + max(0, t_allreduce - delay *
t_step)``, where t_step is the step of a replica that trains alone and t_allreduce is read off the
ledger: from when the last replica sent its part to when the average had arrived there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from benchmarks.intervals import Interval, ratio
from benchmarks.pages import slug
from benchmarks.stored import read_result

RESULTS = Path(__file__).with_name("results.jsonl")
CORES = Path(__file__).with_name("cores.json")
HIDDEN_WITHIN, FORMULA_WITHIN = 0.03, 0.10
ALONE, LINK = "alone", "bare all-reduce"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One contestant at one rate; ratios are taken within a round."""

    name: str
    mbit: float
    every: int
    delay: int
    ratios: Sequence[float]
    """Time per step over that of a replica alone, round by round."""
    average_steps: float | None
    """What an average took, in steps of a replica alone; None where no ledger was kept."""
    predicted: float | None
    """The ratio by the formula, the mean over rounds."""
    off: float | None
    """How much longer a round took than by the formula, as a share of it."""
    exposed_steps: float | None
    """By the ledger: for how long a replica stood still per average, in steps."""
    step_ms: float
    cpu_ms: float
    """Of all threads of a process, per step; what the kernel sends in interrupts is not in it."""

    @property
    def over(self) -> Interval:
        """The mean ratio."""
        return ratio(self.ratios, [1.0] * len(self.ratios))

    @property
    def hidden(self) -> bool:
        """Whether an average takes at most ``delay`` steps."""
        return self.average_steps is not None and self.average_steps <= self.delay


def points(result: dict[str, Any]) -> list[Point]:
    cells: dict[tuple[str, float], list[dict[str, Any]]] = {}
    units: dict[tuple[int, float], list[float]] = {}
    for turn in result["turns"]:
        if turn["name"] == ALONE:
            units.setdefault((turn["round"], turn["mbit"]), []).append(_pace(turn))
    alone = {place: fmean(paces) for place, paces in units.items()}
    for turn in result["turns"]:
        cells.setdefault((turn["name"], turn["mbit"]), []).append(turn)
    return [
        _point(name, mbit, turns, alone, result)
        for (name, mbit), turns in cells.items()
    ]  # fmt: skip


def _pace(turn: dict[str, Any]) -> float:
    """Mean seconds per step of the slowest host."""
    return max(fmean(host["step_s"]) for host in turn["hosts"])


def _point(
    name: str,
    mbit: float,
    turns: list[dict[str, Any]],
    alone: dict[tuple[int, float], float],
    result: dict[str, Any],
) -> Point:
    setting = result["setting"]["contestants"][name]
    every, delay = setting["every"], setting["delay"]
    units = [alone[turn["round"], turn["mbit"]] for turn in turns]
    ratios = [_pace(turn) / unit for turn, unit in zip(turns, units, strict=True)]
    steps = predicted = off = exposed = None
    if name in result["averages"]:
        found = [_averages(result["averages"][name], turn, every, delay) for turn in turns]
        taken = [took / unit for (took, _), unit in zip(found, units, strict=True)]
        by_formula = [(every + max(0.0, took - delay)) / every for took in taken]
        steps, predicted = geometric_mean(taken), geometric_mean(by_formula)
        exposed = fmean(wait / unit for (_, wait), unit in zip(found, units, strict=True))
        off = ratio(ratios, by_formula).centre - 1
    elif name == LINK:
        steps = geometric_mean(ratios)
    return Point(
        name=name,
        mbit=mbit,
        every=every,
        delay=delay,
        ratios=ratios,
        average_steps=steps,
        predicted=predicted,
        off=off,
        exposed_steps=exposed,
        step_ms=1000 * median(map(_pace, turns)),
        cpu_ms=1000 * median(_per_step(turn, lambda host: host["cpu_s"]) for turn in turns),
    )


def _per_step(turn: dict[str, Any], value: Callable[[dict[str, Any]], float]) -> float:
    return fmean(value(host) / len(host["step_s"]) for host in turn["hosts"])


def _averages(
    rows: list[list[float]], turn: dict[str, Any], every: int, delay: int
) -> tuple[float, float]:
    """Means over the averages merged in a turn: what they took, and the wait they caused."""
    first = turn["hosts"][0]["first"]
    last = first + len(turn["hosts"][0]["step_s"])
    # Gradients are numbered by the version they are about to change, weights by their own.
    ahead = 1 if every == 1 else delay
    took: dict[int, list[float]] = {}
    waits: list[float] = []
    for _, number, sent, arrived, wait in rows:
        if first < number + ahead <= last:
            took.setdefault(int(number), []).append(arrived - sent)
            waits.append(wait)
    # An all-reduce begins when the last replica joins: that one sees how long it really takes.
    return fmean(min(times) for times in took.values()), fmean(waits)


def table(result: dict[str, Any]) -> str:
    """Times a replica alone: the mean over rounds, its 95 % interval; by the formula."""
    found = {(point.name, point.mbit): point for point in points(result)}
    rates = result["setting"]["rates"]
    names = [name for name in result["setting"]["contestants"] if name != ALONE]
    lines = [
        "| contestant | " + " | ".join(f"{mbit:g} Mbit/s" for mbit in rates) + " |",
        "|---|" + "---|" * len(rates),
    ]
    alone = [found[ALONE, mbit] for mbit in rates]
    lines.append("| alone, ms a step | " + " | ".join(f"{p.step_ms:.1f}" for p in alone) + " |")
    for name in names:
        cells = []
        for mbit in rates:
            point = found[name, mbit]
            formula = "" if point.predicted is None else f"; {point.predicted:.3f}"
            low, high = point.over.values[1:]
            cells.append(f"{point.over.centre:.3f} ({low:.2f} to {high:.2f}){formula}")
        label = f"{name}, in steps" if name == LINK else name
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def details(result: dict[str, Any]) -> str:
    """What averages took, how much of it was waited for, and the processor time of it all."""
    lines = [
        "| contestant | Mbit/s | average, steps | waited for, steps | formula off by |"
        " extra CPU per step, ms |",
        "|---|---|---|---|---|---|",
    ]
    found = points(result)
    alone = {point.mbit: point for point in found if point.name == ALONE}
    for p in sorted(found, key=lambda p: (p.name, -p.mbit)):
        if p.name in (ALONE, LINK):
            continue
        base = alone[p.mbit]
        averages = "| - | - | - |"
        if p.average_steps is not None and p.exposed_steps is not None and p.off is not None:
            averages = f"| {p.average_steps:.2f} | {p.exposed_steps:.2f} | {p.off:+.1%} |"
        lines.append(f"| {p.name} | {p.mbit:g} {averages} {p.cpu_ms - base.cpu_ms:.1f} |")
    return "\n".join(lines)


def over_ddp(point: Point, every: list[Point]) -> Interval:
    """The better DDP's step at this rate by this one's, round by round."""
    rivals = [p for p in every if p.name.startswith("DDP") and p.mbit == point.mbit]
    return ratio(min(rivals, key=lambda p: p.over.centre).ratios, point.ratios)


def facts() -> Iterator[tuple[str, float | Interval]]:
    for compute, result in read_result(RESULTS).items():
        every = points(result)
        for point in every:
            name = f"{compute}.{slug(point.name)}.{point.mbit:g}"
            yield name, point.over
            if point.predicted is not None:
                yield f"{name}.formula", point.predicted
            if point.delay > 0:
                yield f"{name}.ddp", over_ddp(point, every)
        hidden = [point for point in every if point.delay > 0 and point.hidden]
        yield f"{compute}.hidden", len(hidden)
        near = [point for point in hidden if abs(point.over.centre - 1) <= HIDDEN_WITHIN]
        yield f"{compute}.hidden.within", len(near)
    yield from _facts_of_cores(read_result(CORES))


def _facts_of_cores(result: dict[str, Any]) -> Iterator[tuple[str, float | Interval]]:
    for row in result["summary"]:
        name = f"cores.{row['replicas']}.{slug(row['name'])}"
        yield name, row["throughput_over_one"]
        if row["name"] != ALONE:
            yield f"{name}.over-alone", side_by_side(result, row["replicas"], row["name"], ALONE)
            yield f"{name}.under-ddp", side_by_side(result, row["replicas"], "DDP", row["name"])


def side_by_side(result: dict[str, Any], replicas: int, name: str, other: str) -> Interval:
    """A contestant's step by the other's, round by round."""
    runs = [run["step_s"] for run in result["runs"] if run["replicas"] == replicas]
    own, others = ([s for run in runs for s in run[which]] for which in (name, other))
    return ratio(own, others)


def tables() -> dict[str, str]:
    found = {compute: table(result) for compute, result in read_result(RESULTS).items()}
    return found | {"cores": cores_table(read_result(CORES))}


def cores_table(result: dict[str, Any]) -> str:
    """Throughput over one replica; the step over that of replicas that do not talk."""
    counts = list(dict.fromkeys(row["replicas"] for row in result["summary"]))
    lines = [
        "| contestant | " + " | ".join(f"{count} replicas" for count in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in result["summary"]):
        rows = {row["replicas"]: row for row in result["summary"] if row["name"] == name}
        cells = []
        for count in counts:
            words = f"{rows[count]['throughput_over_one']:.2f}" if count in rows else "-"
            if count in rows and name != ALONE:
                words += f"; {side_by_side(result, count, name, ALONE):.2f}"
            cells.append(words)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quietness(result: dict[str, Any]) -> str:
    """What others took of the cores while it was measured."""
    shares = [host["foreign_share"] for turn in result["turns"] for host in turn["hosts"]]
    repeated = sum(turn["repeats"] for turn in result["turns"])
    return (
        f"others took {median(shares):.1%} of a core (median of turns), at worst {max(shares):.1%};"
        f" {repeated} turns were repeated because of it"
    )


def claims(result: dict[str, Any]) -> list[str]:
    """Whether each claim holds, with the numbers behind it."""
    every = points(result)
    delayed = [point for point in every if point.delay > 0 and point.average_steps is not None]
    hidden = [point for point in delayed if point.hidden]
    beyond = [point for point in delayed if not point.hidden]
    return [*_hidden_claims(hidden, every), *_formula_claims(beyond)]


def _hidden_claims(hidden: list[Point], every: list[Point]) -> list[str]:
    if not hidden:
        return ["1 not tested: no average took at most `delay` steps; give faster links"]
    worst = max(hidden, key=lambda point: abs(point.over.centre - 1))
    good = [point for point in hidden if abs(point.over.centre - 1) <= HIDDEN_WITHIN]
    lines = [
        f"{_answer(len(good) == len(hidden))} 1a: where an average takes at most `delay` steps,"
        f" DaSGD's step is within {HIDDEN_WITHIN:.0%} of a replica alone"
        f" ({len(good)} of {len(hidden)} points; farthest {_words(worst)})"
    ]
    times = [over_ddp(point, every) for point in hidden]
    lines.append(
        f"{_answer(all(found.low > 1 for found in times))} 1b: at each of these points the better"
        f" DDP is slower ({min(t.centre for t in times):.2f} to {max(t.centre for t in times):.2f}"
        f" times DaSGD's step in the same rounds; lowest end of an interval"
        f" {min(t.low for t in times):.2f})"
    )
    return lines


def _formula_claims(beyond: list[Point]) -> list[str]:
    if not beyond:
        return ["2 not tested: no average took more than `delay` steps; give slower links"]
    worst = max(beyond, key=lambda point: abs(point.off or 0.0))
    good = [point for point in beyond if abs(point.off or 0.0) <= FORMULA_WITHIN]
    extras = [
        (point.over.centre - 1) / ((point.predicted or 1.0) - 1)
        for point in beyond
        if point.average_steps is not None and point.average_steps - point.delay >= 0.5
    ]
    lines = [
        f"{_answer(len(good) == len(beyond))} 2a: beyond that a round takes what the formula says,"
        f" within {FORMULA_WITHIN:.0%} ({len(good)} of {len(beyond)} points; farthest"
        f" {_words(worst)}, off by {worst.off or 0.0:+.1%})"
    ]
    if extras:
        within = all(abs(extra - 1) <= FORMULA_WITHIN for extra in extras)
        lines.append(
            f"{_answer(within)} 2b: so does the extra time alone, where it is half a step a round"
            f" or more ({min(extras):.2f} to {max(extras):.2f} of the formula's)"
        )
    return lines


def _answer(yes: bool) -> str:
    return "yes" if yes else "NO "


def _words(point: Point) -> str:
    steps = point.average_steps or 0.0
    return (
        f"{point.name} at {point.mbit:g} Mbit/s, average {steps:.2f} steps, {point.over.centre:.3f}"
    )
