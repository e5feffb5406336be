"""The runs as wholes: in a sentence each, and what was asked for."""

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from offbeat.app.report import words
from offbeat.app.report.cases import MOST_OPEN, Case
from offbeat.app.report.comparison import Comparison
from offbeat.app.report.facts import Facts, listing, mapping
from offbeat.app.report.markup import Markup, fold, join, note, swatch, table, tag
from offbeat.app.report.verdict import verdict


def summary(cases: Sequence[Case], comparison: Comparison | None) -> Markup:
    """The verdict, then every run in a sentence: folded where there are many."""
    runs = [(case.place, run) for case in cases for run in case.runs]
    if len(runs) == 1:
        return join([_sentence(runs[0][1], None), verdict(cases, comparison)])
    sentences = [tag("div", _sentence(run, place), class_="run") for place, run in runs]
    every = fold("Every run in a sentence", *sentences, open_=len(runs) <= MOST_OPEN)
    return join([verdict(cases, comparison), every])


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
    unknown = "no end was recorded: it was killed, or is still running"
    text = run.status or ("still running" if run.running else unknown)
    if run.steps:
        text += f" after {words.plural(run.steps, 'step')}"
        text += f" in {words.seconds(run.time_s)}" if run.time_s else ""
    scores = []
    if run.accuracy is not None:
        scores.append(f"{words.percent(run.accuracy)} accuracy")
    if run.loss is not None:
        scores.append(f"loss {words.number(run.loss)}")
    return f"{text}, {' and '.join(scores)}" if scores else f"{text}, no score was recorded"


def configuration_table(cases: Sequence[Case]) -> Markup:
    """Of several runs first what differs, a column per configuration; the rest is folded."""
    columns = [[_settings(run) for run in case.runs] for case in cases]
    every = dict.fromkeys(key for runs in columns for run in runs for key in run)
    groups = list(dict.fromkeys(map(_group, every)))
    keys = sorted(every, key=lambda key: groups.index(_group(key)))
    if not keys:
        return note("The configuration is empty.")
    unlike = {key: [_values(key, runs) for runs in columns] for key in keys}
    one = len(cases) == len(columns[0]) == 1
    unequal = [key for key in keys if len(set(chain(*unlike[key]))) > 1]
    # These two are of a run alone, and tell no configuration from another.
    differing = [] if one else [key for key in unequal if key not in ("command", "started")]
    of_runs = [run for case in cases for run in case.runs]
    commands = [
        tag("div", tag("b", run.label), tag("pre", of["command"]))
        for run, of in zip(of_runs, chain(*columns), strict=True)
        if "command" in of and "command" in unequal
    ]
    alike = [(key, unlike[key][0][0]) for key in keys if one or key not in unequal]
    shown = table("What was asked for", ("setting", "value"), alike, class_="configuration")
    if one:
        return shown
    head = ("setting", *(join([swatch(case.place), case.label]) for case in cases))
    body = [
        (tag("b", key, title="differs"), *(_stacked(values) for values in unlike[key]))
        for key in differing
    ]
    return join(
        [
            table("Settings that differ", head, body, class_="configuration") if body else None,
            None if not commands else fold("The command of every run", *commands),
            fold(f"{words.plural(len(alike), 'setting')} that all runs share", shown),
        ]
    )


def _values(key: str, runs: Sequence[dict[str, str]]) -> list[str]:
    """Of the runs of a configuration, each once."""
    return list(dict.fromkeys(run.get(key, words.MISSING) for run in runs))


def _stacked(values: Sequence[str]) -> object:
    return values[0] if len(values) == 1 else join(tag("div", value) for value in values)


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
