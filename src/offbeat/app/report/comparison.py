"""The runs side by side, each with its gap to the synchronous run that it may be compared with."""

from collections.abc import Sequence
from statistics import fmean, stdev

from offbeat.app.report import words
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, join, note, swatch, table


def comparison(facts: Sequence[Facts]) -> Markup:
    plain = [run for run in facts if run.synchronous]
    by_accuracy = any(run.accuracy is not None for run in plain)
    plain = [run for run in plain if _scores([run], by_accuracy)]
    gaps = [_gap(run, facts, plain, by_accuracy) for run in facts]
    unit = "points" if by_accuracy else "in loss"
    head = (
        *("run", "method", "seed", "lag per stage", "accuracy"),
        *(f"gap, {unit}", "test loss", "time per step", "rows/s", "end"),
    )
    body = [
        (
            join([swatch(place), " ", run.label]),
            _method_words(run),
            _seeds([run]),
            words.listed(run.lags),
            words.percent(run.accuracy),
            gaps[place][0],
            words.number(run.loss),
            words.seconds(run.step_s),
            words.number(run.rows_per_s),
            run.status or "not recorded",
        )
        for place, run in enumerate(facts)
    ]
    notes = dict.fromkeys(text for _, texts in gaps for text in texts)
    if not plain:
        notes = {"None of the runs is synchronous with a score, so no gap is given.": None}
    return join([table("The runs side by side", head, body, class_="side"), *map(note, notes)])


def _gap(
    run: Facts, facts: Sequence[Facts], plain: Sequence[Facts], by_accuracy: bool
) -> tuple[str, list[str]]:
    """In words, and what a reader has to know of it. ``plain``: the synchronous runs with scores.

    To the one of the nearest recipe and of the run's seed, or else the means of all seeds.
    """
    of_data = [other for other in plain if run.has_data_of(other)]
    if not of_data:
        return words.MISSING, [f"{run.label} has no gap: no synchronous run has its data."]
    unlike = min((run.recipe_unlike(other) for other in of_data), key=len)
    rivals = [other for other in of_data if run.recipe_unlike(other) == unlike]
    own = [other for other in facts if other.case == run.case and _scores([other], by_accuracy)]
    if run in rivals or run not in own:
        return "baseline" if run in rivals else words.MISSING, []
    notes = []
    # An older run may not say its seed.
    twins = [other for other in rivals if None in (other.seed, run.seed) or other.seed == run.seed]
    if unlike:
        base = (twins or rivals)[0].label
        notes.append(f"{run.label} and {base} differ in more than staleness: {', '.join(unlike)}.")
    compared, base = ([run], twins[0].label) if twins else (own, "the mean")
    ours, theirs = (_scores(runs, by_accuracy) for runs in (compared, twins[:1] or rivals))
    if not twins:
        notes.append(
            f"{_method_words(run)}: not every seed has a synchronous run, so means are compared:"
            f" {_mean(ours, by_accuracy)} (seeds {_seeds(own)}) with"
            f" {_mean(theirs, by_accuracy)} (seeds {_seeds(rivals)}); part of that is chance."
        )
    return f"{_mean([fmean(ours) - fmean(theirs)], by_accuracy, '+')} to {base}", notes


def _scores(runs: Sequence[Facts], by_accuracy: bool) -> list[float]:
    scores = (run.accuracy if by_accuracy else run.loss for run in runs)
    return [score for score in scores if score is not None]


def _mean(values: Sequence[float], by_accuracy: bool, sign: str = "") -> str:
    """With one standard deviation where there is one."""
    scale, digits = (100, 1) if by_accuracy else (1, 4)
    spread = f" \N{PLUS-MINUS SIGN} {scale * stdev(values):.{digits}f}" if values[1:] else ""
    return f"{scale * fmean(values):{sign}z.{digits}f}{spread}"


def _seeds(runs: Sequence[Facts]) -> str:
    return words.listed([words.MISSING if run.seed is None else run.seed for run in runs])


def _method_words(run: Facts) -> str:
    text = run.method_in_full or words.MISSING
    text += f", {words.plural(run.stages, 'stage')}" if run.stages else ""
    if run.replicas > 1:
        text += f", {run.replicas} replicas"
        text += f", {run.averaging}" if run.averaging else ""
    return text
