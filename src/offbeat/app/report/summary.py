"""The top of the page: a sentence per run, and the runs side by side."""

from collections.abc import Sequence

from offbeat.app.report import words
from offbeat.app.report.facts import Facts, baseline
from offbeat.app.report.markup import Markup, join, table, tag
from offbeat.app.report.parts import note, swatch


def summary(facts: Sequence[Facts]) -> Markup:
    return join(
        tag("div", _sentence(run, place if len(facts) > 1 else None), _trouble(run), class_="run")
        for place, run in enumerate(facts)
    )


def _sentence(run: Facts, place: int | None) -> Markup:
    name = join([swatch(place), " "]) if place is not None else None
    return tag("p", name, tag("strong", run.label), f" {_set_up(run)}; {_outcome(run)}.")


def _set_up(run: Facts) -> str:
    how = run.method_in_full or "an unknown method"
    text = f"trained {run.model or 'a model'} with {how}"
    if run.stages:
        text += f" over {words.plural(run.stages, 'stage')}"
    if run.replicas > 1:
        text += f" and {run.replicas} replicas"
        text += f" ({run.averaging})" if run.averaging else ""
    if run.lags:
        lag = f"lag {words.listed(run.lags)} updates" if any(run.lags) else "no lag"
        text += f", {lag}"
    return text


def _outcome(run: Facts) -> str:
    text = run.status or "no end was recorded: it was killed, or is still running"
    if run.steps:
        text += f" after {words.plural(run.steps, 'step')}"
        text += f" in {words.seconds(run.time_s)}" if run.time_s else ""
    scores = []
    if run.accuracy is not None:
        scores.append(f"{words.percent(run.accuracy)} accuracy")
    if run.loss is not None:
        scores.append(f"loss {words.number(run.loss)}")
    return f"{text}, {' and '.join(scores)}" if scores else f"{text}, no score was recorded"


def _trouble(run: Facts) -> Markup | None:
    if run.diverged_at is not None:
        return note(f"The training loss was not a finite number at step {run.diverged_at}.")
    if run.diverged:
        return note("The test loss is not a finite number: training has diverged.")
    return None


def comparison(facts: Sequence[Facts]) -> Markup:
    base = baseline(facts)
    head = ["run", "method", "lag per stage", "accuracy"]
    by_accuracy = base is not None and base.accuracy is not None
    if base is not None:
        head.append(f"gap to {base.label}, {'points' if by_accuracy else 'in loss'}")
    head += ["test loss", "time per step", "rows/s", "end"]
    body = []
    for place, run in enumerate(facts):
        cells: list[object] = [
            join([swatch(place), " ", run.label]),
            _method_words(run),
            words.listed(run.lags),
            words.percent(run.accuracy),
        ]
        if base is not None:
            cells.append("baseline" if run is base else _gap(run, base, by_accuracy=by_accuracy))
        cells += [
            words.number(run.loss),
            words.seconds(run.step_s),
            words.number(run.rows_per_s),
            run.status or "not recorded",
        ]
        body.append(cells)
    missing = note("None of the runs is synchronous with a score, so no gap is given.")
    others = {} if base is None else {run.label: run.recipe_unlike(base) for run in facts}
    unlike = [
        note(f"{label} and {base.label if base else ''} differ in more than staleness: {listed}.")
        for label, names in others.items()
        if (listed := ", ".join(names))
    ]
    side_by_side = table("The runs side by side", head, body, class_="side")
    return join([side_by_side, None if base else missing, *unlike])


def _gap(run: Facts, base: Facts, *, by_accuracy: bool) -> str:
    ours, theirs = (run.accuracy, base.accuracy) if by_accuracy else (run.loss, base.loss)
    if ours is None or theirs is None:
        return words.MISSING
    return words.points(ours - theirs) if by_accuracy else f"{ours - theirs:+.4f}"


def _method_words(run: Facts) -> str:
    text = run.method_in_full or words.MISSING
    text += f", {words.plural(run.stages, 'stage')}" if run.stages else ""
    if run.replicas > 1:
        text += f", {run.replicas} replicas"
        text += f", {run.averaging}" if run.averaging else ""
    return text
