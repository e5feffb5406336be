"""The runs as wholes: in a sentence each, and what was asked for."""

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from offbeat.app.report import words
from offbeat.app.report.facts import Facts, listing, mapping
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


def configuration_table(facts: Sequence[Facts]) -> Markup:
    columns = [_settings(run) for run in facts]
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


def _settings(run: Facts) -> dict[str, str]:
    """As they were asked for; the cuts also where the first batch decided them."""
    flat = dict(_flat(run.config))
    if typed := listing(run.config.get("command")):  # of an earlier version
        flat["command"] = shlex.join(map(str, typed))
    cuts = listing(run.config.get("cuts")) or listing(run.summary.get("cuts"))
    return flat | ({"cuts": words.listed(cuts)} if cuts else {})


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
