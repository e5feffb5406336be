"""The runs as wholes: in a sentence each, side by side, and what was asked for."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from offbeat.app.report import words
from offbeat.app.report.facts import Facts, baseline, mapping
from offbeat.app.report.markup import Markup, join, note, swatch, table, tag


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
    unit = "in loss" if base is None or base.accuracy is None else "points"
    head = (
        *("run", "method", "lag per stage", "accuracy"),
        *(() if base is None else (f"gap to {base.label}, {unit}",)),
        *("test loss", "time per step", "rows/s", "end"),
    )
    body = [
        (
            join([swatch(place), " ", run.label]),
            _method_words(run),
            words.listed(run.lags),
            words.percent(run.accuracy),
            *(() if base is None else (_gap(run, base),)),
            words.number(run.loss),
            words.seconds(run.step_s),
            words.number(run.rows_per_s),
            run.status or "not recorded",
        )
        for place, run in enumerate(facts)
    ]
    side_by_side = table("The runs side by side", head, body, class_="side")
    if base is None:
        missing = "None of the runs is synchronous with a score, so no gap is given."
        return join([side_by_side, note(missing)])
    unlike = [
        note(f"{run.label} and {base.label} differ in more than staleness: {', '.join(names)}.")
        for run in facts
        if (names := run.recipe_unlike(base))
    ]
    return join([side_by_side, *unlike])


def _gap(run: Facts, base: Facts) -> str:
    if run is base:
        return "baseline"
    by_accuracy = base.accuracy is not None
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


def configuration_table(facts: Sequence[Facts]) -> Markup:
    columns = [dict(_flat(run.config)) for run in facts]
    groups = dict.fromkeys(_group(key) for column in columns for key in column)
    every = dict.fromkeys(key for column in columns for key in column)
    keys = sorted(every, key=lambda key: list(groups).index(_group(key)))
    if not keys:
        return note("The configuration is empty.")
    body = []
    for key in keys:
        values = [column.get(key, words.MISSING) for column in columns]
        differs = len(set(values)) > 1
        body.append((tag("b", key, title="differs") if differs else key, *values))
    head = ["setting", *(run.label for run in facts)] if len(facts) > 1 else ["setting", "value"]
    several = "; settings in bold differ" if len(facts) > 1 else ""
    return table(f"What was asked for{several}", head, body, class_="configuration")


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings by their path, ``optimizer.lr``."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(mapping(value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _written(value)


def _group(key: str) -> str:
    return key.partition(".")[0]


def _written(value: object) -> str:
    if isinstance(value, list | tuple) and not any(isinstance(v, list | dict) for v in value):
        return words.listed(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)
