"""What happened at each stage: lag, staleness, gradients, memory and waiting, as tables."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from offbeat.app.report import words
from offbeat.app.report.facts import AtStage, Facts
from offbeat.app.report.markup import Markup, join, note, per_run, place, table, tag
from offbeat.records.readings import WHATS, What

_HEADS: dict[What, str] = {
    "staleness": "staleness, median",
    "prediction": "prediction error as a share of none",
    "cosine": "cosine of stale and fresh gradients",
}
"""What a column is called, where the reading's own name would not do."""
_MOST_LAGS = 16
"""Lines of a lag histogram; more lags are counted in ranges."""


def lags(facts: Sequence[Facts]) -> Markup:
    text = "Updates that a stage made between a micro-batch's forward and its gradient's use."
    return join([note(text), per_run(facts, _histograms)])


def _histograms(run: Facts) -> Markup:
    if not run.lag_counts:
        return note("No lags were recorded.")
    stages = [_histogram(stage, counts, run.lags) for stage, counts in run.lag_counts.items()]
    return tag("div", *stages, class_="small")


def _histogram(stage: int, counts: dict[int, int], declared: Sequence[int]) -> Markup:
    bins = binned(counts, _MOST_LAGS)
    total = sum(counts.values())
    most = max(times for _, times in bins)
    body = [(word, _bar(times / most), f"{times:,}") for word, times in bins]
    mean = sum(lag * times for lag, times in counts.items()) / total
    caption = f"Stage {stage}: mean {mean:.3g}"
    caption += f", declared {declared[stage]}" if stage < len(declared) else ""
    return table(caption, ("lag", "", "count"), body, class_="bars")


def binned(counts: dict[int, int], most: int) -> list[tuple[str, int]]:
    """Counts per lag in order, or per range of lags where there are too many.

    >>> binned({6: 9, 0: 1}, 16)
    [('0', 1), ('6', 9)]
    >>> binned({lag: 1 for lag in range(6)}, 3)
    [('0 to 1', 2), ('2 to 3', 2), ('4 to 5', 2)]
    """
    if len(counts) <= most:
        return [(str(lag), counts[lag]) for lag in sorted(counts)]
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // most)
    bins: Counter[int] = Counter()
    for lag in sorted(counts):
        bins[low + (lag - low) // width * width] += counts[lag]
    return [(f"{start} to {start + width - 1}", times) for start, times in bins.items()]


def _bar(share: float, kind: str = "") -> Markup:
    width = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
    return tag("span", tag("i", style=width, class_=kind or None), class_="bar")


def staleness(facts: Sequence[Facts]) -> Markup:
    text = (
        "How stale a stage is: lr / (1 - momentum) x curvature x lag. On a quadratic without"
        " noise, staleness does little below 0.1, weight prediction helps up to 1, and beyond that"
        " plain momentum is near its limit. Here the curvature is read off gradients of different"
        " batches, whose noise counts as well: the number is easily several times too high. Compare"
        " stages and runs by it; what a run can take, its loss says."
    )
    return join([note(text), per_run(facts, _readings)])


def _readings(run: Facts) -> Markup:
    if not run.readings:
        return note("This run had no monitor.")
    values: dict[tuple[int, int], dict[str, list[float]]] = {}
    for reading in run.readings:
        of_stage = values.setdefault((reading.replica, reading.stage), {})
        of_stage.setdefault(reading.what, []).append(reading.value)
    body = [
        (
            place(run, replica, stage),
            *(words.number(median(of[what]) if what in of else None) for what in WHATS),
            words.number(max(of.get("staleness", ()), default=None)),
        )
        for (replica, stage), of in sorted(values.items())
    ]
    head = ("stage", *(_HEADS.get(what, what) for what in WHATS), "staleness, largest")
    return table("How stale, per stage", head, body, class_="numbers")


_SEEN_BY_GUARDS = {
    "updates": "updates",
    "median_norm": "norm, median",
    "largest_norm": "norm, largest",
    "clipped": "clipped",
    "not_finite": "not finite",
    "skipped": "skipped",
    "rolled_back": "rolled back",
    "largest_lag": "lag, largest",
}


def gradients(facts: Sequence[Facts]) -> Markup:
    text = (
        "The norm of all gradients of a stage together, before clipping, at every update. One that"
        " is not finite is applied, skipped or rolled back, as the run's guard was told to; the"
        " largest norm is that of the finite ones."
    )
    return join([note(text), per_run(facts, _guarded)])


def _guarded(run: Facts) -> Markup:
    if not run.guarded:
        return note("This run had no guards.")
    body = [
        (
            place(run, of.replica, of.stage),
            *(words.number(of.numbers.get(name)) for name in _SEEN_BY_GUARDS),
        )
        for of in run.guarded
    ]
    return table(
        "Gradients, per stage", ("stage", *_SEEN_BY_GUARDS.values()), body, class_="numbers"
    )


_PARTS = {
    "weight_bytes": ("weights", "weights"),
    "in_flight_bytes": ("flight", "in flight"),
    "correction_bytes": ("kept", "corrections, monitor"),
}
"""Of the memory of a stage: how each is drawn, and its name."""


def memory(facts: Sequence[Facts]) -> Markup:
    """Bars of all runs have one scale, so that they can be compared."""
    most = max((_bytes(entry) for run in facts for entry in run.memory), default=0.0)
    return per_run(facts, lambda run: _memory_table(run, most or 1.0))


def _memory_table(run: Facts, most: float) -> Markup:
    if not run.memory:
        return note("No memory was recorded.")
    body = [
        (
            place(run, entry.replica, entry.stage),
            _stack(entry, most),
            *(words.size(entry.numbers.get(key)) for key in _PARTS),
            _now_and_peak(entry, ("weight_copies",), "peak_weight_copies"),
            _now_and_peak(entry, ("graphs", "inputs"), "peak_in_flight"),
        )
        for entry in run.memory
    ]
    head = (
        "stage",
        "",
        *(join([tag("i", class_=f"box {kind}"), name]) for kind, name in _PARTS.values()),
        "weight copies (most)",
        "micro-batches (most)",
    )
    return table("What each stage held before the last drain", head, body, class_="bars")


def _bytes(entry: AtStage) -> float:
    return sum(entry.numbers.get(key, 0.0) for key in _PARTS)


def _stack(entry: AtStage, most: float) -> Markup:
    bars = [
        tag("i", style=f"width:{100 * entry.numbers[key] / most:.1f}%", class_=kind)
        for key, (kind, _) in _PARTS.items()
        if entry.numbers.get(key)
    ]
    return tag("span", *bars, class_="bar")


def _now_and_peak(entry: AtStage, now: Sequence[str], peak: str) -> str:
    known = [entry.numbers[key] for key in now if key in entry.numbers]
    if not known:
        return words.MISSING
    most = f" ({words.number(entry.numbers[peak])})" if peak in entry.numbers else ""
    return f"{words.number(sum(known))}{most}"


def waiting(facts: Sequence[Facts]) -> Markup:
    longest = max((_waited(wait) for run in facts for wait in run.waits), default=0.0)
    return per_run(facts, lambda run: join([_busy(run), _waits(run, longest or 1.0)]))


def _busy(run: Facts) -> Markup:
    if not run.busy_share:
        return note("No busy shares were recorded.")
    body = [
        (f"stage {stage}", _bar(share), words.percent(share))
        for stage, share in enumerate(run.busy_share)
    ]
    return table("Part of the time each stage worked", ("stage", "", "busy"), body, class_="bars")


def _waits(run: Facts, longest: float) -> Markup:
    if not run.waits and run.replicas == 1:
        return note("One replica: there are no averages to wait for.")
    if not run.waits:
        return note("No waits for averages were recorded.")
    body = [
        (
            place(run, wait.replica, wait.stage),
            _bar(_waited(wait) / longest, "wait"),
            words.seconds(_waited(wait)),
            words.seconds(wait.numbers.get("longest_s", 0.0)),
            f"{wait.numbers.get('averages', 0):,.0f}",
        )
        for wait in run.waits
    ]
    head = ("stage", "", "in all", "longest", "averages")
    return table("Standing still until an average arrived", head, body, class_="bars")


def _waited(wait: AtStage) -> float:
    return wait.numbers.get("total_s", 0.0)
