"""What a reader should know first, in a few sentences that numbers of the page bear out."""

from collections.abc import Iterator, Sequence
from typing import Literal

from offbeat.app.report import words
from offbeat.app.report.cases import Case
from offbeat.app.report.comparison import Comparison, Standing
from offbeat.app.report.curves import Front
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, tag
from offbeat.app.report.pace import Pace, straggler_in_words
from offbeat.app.report.stages import lag_verdict, stalest, zone_of

Mark = Literal["good", "care", "bad", "plain"]
_SIGNS = {
    "good": "\N{CHECK MARK}",
    "care": "!",
    "bad": "\N{MULTIPLICATION SIGN}",
    "plain": "\N{BULLET}",
}
Sentence = tuple[Mark, str]


def verdict(cases: Sequence[Case], comparison: Comparison | None) -> Markup | None:
    """Nothing where a run says too little for a sentence."""
    if comparison is None:
        said = list(_of_one(cases[0].first))
    else:
        said = [*_of_several(comparison), *_of_time(cases), *_troubles(cases)]
    lines = [
        tag("li", tag("i", _SIGNS[mark], aria_hidden="true"), tag("span", text), class_=mark)
        for mark, text in said
    ]
    return tag("ul", *lines, class_="verdict") if lines else None


# ---------------------------------------------------------------------------- one run


def _of_one(run: Facts) -> Iterator[Sentence]:
    yield from _troubles_of(run)
    if told := lag_verdict(run):
        within = told.startswith("every")
        lags = f"Declared lags are {words.listed(run.lags)} updates" if any(run.lags) else "No lag"
        yield "good" if within else "bad", f"{lags}; {told}."
    if run.stale_share:
        share = words.percent(run.stale_share)
        yield "plain", f"{share} of the weights are stale: they are in stages that lag."
    worst = stalest(run)
    if worst is not None:
        where, value = worst
        mark: Mark = "care" if value >= 1 else "good"
        yield (
            mark,
            (
                f"The monitor finds {where} the stalest, at {words.number(value)}: {zone_of(value)}"
                " on a quadratic. Noise counts in it, so this is easily several times too high."
            ),
        )
    pace = Pace.of(run.ledger)
    if pace is not None and len(pace.work) > 1:
        yield "care" if pace.has_straggler else "good", straggler_in_words(run, pace)
    waited = sum(wait.numbers.get("total_s", 0.0) for wait in run.waits)
    if run.waits and run.time_s:
        longest = max(wait.numbers.get("total_s", 0.0) for wait in run.waits)
        yield (
            "care" if longest > 0.05 * run.time_s else "good",
            (
                f"For averages the stage that waited most stood still for {words.seconds(longest)}"
                f" of {words.seconds(run.time_s)}; all together for {words.seconds(waited)}."
            ),
        )


def _troubles(cases: Sequence[Case]) -> Iterator[Sentence]:
    for run in (run for case in cases for run in case.runs):
        for mark, text in _troubles_of(run):
            yield mark, f"{run.label}: {text[0].lower()}{text[1:]}"


def _troubles_of(run: Facts) -> Iterator[Sentence]:
    if run.diverged_at is not None:
        yield "bad", f"The training loss was not a finite number at step {run.diverged_at}."
    elif run.diverged:
        yield "bad", "The test loss is not a finite number: training has diverged."
    if run.status == "failed":
        yield "bad", "It failed before its end; what is here is what it had stored."
    elif run.status == "interrupted":
        yield "care", "It was interrupted: its end is not that of the whole recipe."
    elif run.status is None and not run.running:
        yield (
            "care",
            "No end was recorded: it was killed, or goes on where this machine cannot see.",
        )
    dropped = sum(
        g.numbers.get("skipped", 0) + g.numbers.get("rolled_back", 0) for g in run.guarded
    )
    if dropped:
        yield "bad", f"Its guards dropped {words.plural(int(dropped), 'update')}."


# ---------------------------------------------------------------------------- several runs


def _of_several(comparison: Comparison) -> Iterator[Sentence]:
    standings = [comparison.standing(case) for case in comparison.cases]
    for standing in standings:
        if standing.baseline:
            yield (
                "plain",
                f"Plain training ({standing.case.label}) ends at {_score(standing.case)}.",
            )
    best_first = 1 if comparison.by_accuracy else -1
    told = [(s.mean, s) for s in standings if s.mean is not None]
    for mean, standing in sorted(told, key=lambda pair: -best_first * pair[0]):
        yield _against_plain(standing, mean, comparison.by_accuracy)
    if not told and not any(s.baseline for s in standings):
        scored = [case for case in comparison.cases if case.accuracies or case.losses]
        for case in scored:
            yield "plain", f"{case.label} ends at {_score(case)}."


def _against_plain(standing: Standing, mean: float, by_accuracy: bool) -> Sentence:
    factor, unit, digits = (100, "points", 1) if by_accuracy else (1, "in loss", 4)
    name, half = standing.case.label, standing.half
    side = "above" if mean > 0 else "below"
    size = f"{abs(factor * mean):.{digits}f}"
    text = f"{name} ends {size} {unit} {side} it" if float(size) else f"{name} ends level with it"
    if len(standing.gaps) == 2 and half is not None:
        return "plain", f"{text} (two pairs of seeds, which say little)."
    if half is None:
        why = "one pair of seeds" if standing.paired else "no pairs of the same seed"
        return "plain", f"{text} ({why}, which says little)."
    ends = " to ".join(f"{factor * end:+z.{digits}f}" for end in (mean - half, mean + half))
    text += f" ({ends} at 95 %, {len(standing.gaps)} seeds)"
    worse = mean < 0 if by_accuracy else mean > 0
    if abs(mean) <= half:
        return "care", f"{text}: these seeds cannot tell the two apart."
    return "bad" if worse else "good", f"{text}: {'a loss' if worse else 'a gain'} beyond chance."


def _score(case: Case) -> str:
    if case.accuracies:
        spread = max(case.accuracies) - min(case.accuracies)
        over = (
            f" over {len(case.accuracies)} runs, {100 * spread:.1f} points apart" if spread else ""
        )
        return f"{words.percent(sum(case.accuracies) / len(case.accuracies))}{over}"
    if case.losses:
        return f"loss {words.number(sum(case.losses) / len(case.losses))}"
    return "no score"


def _of_time(cases: Sequence[Case]) -> Iterator[Sentence]:
    front = Front.of(cases)
    if front is None or len(cases) < 2:
        return
    held = front.holders()
    if len(held) == 1:
        text = f"{cases[held[0][1]].label} is ahead at every time"
    else:
        text = "; ".join(f"{cases[k].label} from {words.seconds(start)}" for start, k in held[:4])
        text = f"Best {front.noun} by time: {text}"
    yield "plain", f"{text}.{'' if front.caveat is None else ' ' + front.caveat}"
