"""What each stage is and what happened there: size, lag, staleness, gradients, memory."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from offbeat.app.report import words
from offbeat.app.report.cases import Case, per_case
from offbeat.app.report.facts import AtStage, Facts
from offbeat.app.report.markup import Markup, bar, join, note, place, scale, table, tag
from offbeat.records.readings import WHATS, What

_HEADS: dict[What, str] = {
    "staleness": "staleness, median",
    "prediction": "prediction error as a share of none",
    "cosine": "cosine of stale and fresh gradients",
}
"""What a column is called, where the reading's own name would not do."""
_MOST_LAGS = 16
"""Lines of a lag histogram; more lags are counted in ranges."""


def sizes(cases: Sequence[Case]) -> Markup:
    text = "Stale are the weights of stages that lag: their gradients were computed at older ones."
    kinds = (("weights", "not stale"), ("flight", "stale"))
    key = tag("p", *(tag("span", tag("i", class_=f"box {k}"), w) for k, w in kinds), class_="key")
    return join([note(text), key, per_case(cases, _sizes, _stale_words)])


def _stale_words(run: Facts) -> str:
    return "" if run.stale_share is None else f"{words.percent(run.stale_share)} of weights stale"


def _sizes(run: Facts) -> Markup:
    if not run.sizes:
        return note("This run does not say how large its stages are: it goes on, or is older.")
    total = sum(parameters for parameters, _ in run.sizes) or 1.0
    body: list[tuple[object, ...]] = []
    for stage, (parameters, layers) in enumerate(run.sizes):
        counts = run.lag_counts.get(stage, {})
        late = sum(times for lag, times in counts.items() if lag) / (sum(counts.values()) or 1)
        lag = run.lags[stage] if stage < len(run.lags) else None
        share = bar(parameters / total, "flight" if lag else "")
        text = words.MISSING if lag is None else words.percent(parameters / total if lag else 0.0)
        measured = words.percent(late) if counts else words.MISSING
        cells = (words.number(layers), words.number(parameters), words.percent(parameters / total))
        body.append((f"stage {stage}", share, *cells, words.number(lag), text, measured))
    if run.stale_share is not None:
        layers = sum(layers for _, layers in run.sizes)
        whole = (words.number(layers), words.number(total), words.percent(1.0), "")
        body.append(("model", "", *whole, words.percent(run.stale_share), ""))
    head = ("stage", "", "layers", "parameters", "of all", "lag", "stale weights", "late gradients")
    return table("How large each stage is, and how much of it is stale", head, body, class_="bars")


def lags(cases: Sequence[Case]) -> Markup:
    text = "Updates that a stage made between a micro-batch's forward and its gradient's use."
    return join([note(text), per_case(cases, _histograms, _lags_in_words)])


def _lags_in_words(run: Facts) -> str:
    return f"declared {words.listed(run.lags)}; {lag_verdict(run) or 'nothing was measured'}"


def lag_verdict(run: Facts) -> str:
    """Whether the measured lags are within the declared ones; empty where nobody can say."""
    if not run.lag_counts or not run.lags or max(run.lag_counts) >= len(run.lags):
        return ""
    most = {stage: max(counts) for stage, counts in run.lag_counts.items()}
    late = [stage for stage, lag in most.items() if lag > run.lags[stage]]
    if not late:
        return "every measured lag was within them"
    return "; ".join(f"stage {k} was {most[k]} late, declared {run.lags[k]}" for k in late)


def _histograms(run: Facts) -> Markup:
    if not run.lag_counts:
        return note("No lags were recorded.")
    stages = [_histogram(stage, counts, run.lags) for stage, counts in run.lag_counts.items()]
    return tag("div", *stages, class_="small")


def _histogram(stage: int, counts: dict[int, int], declared: Sequence[int]) -> Markup:
    bins = binned(counts, _MOST_LAGS)
    total = sum(counts.values())
    most = max(times for _, times in bins)
    body = [(word, bar(times / most), f"{times:,}") for word, times in bins]
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


ZONES = ((0.1, "does little"), (1.0, "prediction helps"), (None, "near the limit"))
"""Of a quadratic without noise: up to which staleness what is to be expected."""
_SCALE = (-2.0, 2.0)
"""Powers of ten at the ends of the gauge."""


def zone_of(value: float) -> str:
    """
    >>> zone_of(0.05), zone_of(0.5), zone_of(7)
    ('does little', 'prediction helps', 'near the limit')
    """
    return next(word for end, word in ZONES if end is None or value < end)


def staleness(cases: Sequence[Case]) -> Markup:
    text = (
        "How stale a stage is: lr / (1 - momentum) x curvature x lag. On a quadratic without"
        " noise, staleness does little below 0.1, weight prediction helps up to 1, and beyond that"
        " plain momentum is near its limit. Here the curvature is read off gradients of different"
        " batches, whose noise counts as well: the number is easily several times too high. Compare"
        " stages and runs by it; what a run can take, its loss says."
    )
    return join([note(text), per_case(cases, _readings, _stalest)])


def stalest(run: Facts) -> tuple[str, float] | None:
    """The place with the highest median staleness, and that median."""
    values = {
        place(run, replica, stage): median(of["staleness"])
        for (replica, stage), of in _read(run).items()
        if of.get("staleness")
    }
    return max(values.items(), key=lambda pair: pair[1]) if values else None


def _stalest(run: Facts) -> str:
    worst = stalest(run)
    if worst is None:
        return "" if run.readings else "no monitor"
    where, value = worst
    return f"{where} is the stalest, {words.number(value)}: {zone_of(value)}"


def _read(run: Facts) -> dict[tuple[int, int], dict[str, list[float]]]:
    values: dict[tuple[int, int], dict[str, list[float]]] = {}
    for reading in run.readings or ():
        of_stage = values.setdefault((reading.replica, reading.stage), {})
        if math.isfinite(reading.value):
            of_stage.setdefault(reading.what, []).append(reading.value)
    return values


def _readings(run: Facts) -> Markup:
    if not run.readings:
        return note("This run had no monitor.")
    values = _read(run)
    body = [
        (
            place(run, replica, stage),
            _gauge(of.get("staleness", ())),
            *(words.number(median(of[what]) if what in of else None) for what in WHATS),
            words.number(max(of.get("staleness", ()), default=None)),
        )
        for (replica, stage), of in sorted(values.items())
    ]
    zones = tag("span", *(tag("i", word) for _, word in ZONES), class_="zones")
    ends = tag("span", *(tag("i", f"{10.0**power:g}") for power in range(-2, 3)), class_="ticks")
    gauge = join(["staleness, median to largest; log scale", zones, ends])
    head = ("stage", gauge, *(_HEADS.get(what, what) for what in WHATS), "staleness, largest")
    return table("How stale, per stage", head, body, class_="gauges")


def _gauge(values: Sequence[float]) -> Markup | str:
    """On a scale of powers of ten: a mark at the median, a bar from there to the largest."""
    above = [value for value in values if value > 0]
    if not above:
        return "no lag, nothing to read"
    middle, most = (math.log10(value) for value in (median(above), max(above)))
    return scale(*_SCALE, [], (middle, most), mean=middle, class_="gauge")


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


def gradients(cases: Sequence[Case]) -> Markup:
    text = (
        "The norm of all gradients of a stage together, before clipping, at every update. One that"
        " is not finite is applied, skipped or rolled back, as the run's guard was told to; the"
        " largest norm is that of the finite ones."
    )
    return join([note(text), per_case(cases, _guarded)])


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


def memory(cases: Sequence[Case]) -> Markup:
    """Bars of all runs have one scale, so that they can be compared."""
    runs = [run for case in cases for run in case.runs]
    most = max((_bytes(entry) for run in runs for entry in run.memory), default=0.0)
    return per_case(cases, lambda run: _memory_table(run, most or 1.0), _memory_in_words)


def _memory_in_words(run: Facts) -> str:
    if not run.memory:
        return ""
    return f"{words.size(sum(map(_bytes, run.memory)))} in all stages together"


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
