"""The stored configuration as a table: one column per run, differences marked."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from offbeat.app.report import words
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, table, tag
from offbeat.app.report.values import mapping


def configuration_table(facts: Sequence[Facts]) -> Markup:
    columns = [dict(_flat(run.config)) for run in facts]
    groups = dict.fromkeys(_group(key) for column in columns for key in column)
    found = dict.fromkeys(key for column in columns for key in column)
    keys = sorted(found, key=lambda key: list(groups).index(_group(key)))
    if not keys:
        return tag("p", "The configuration is empty.", class_="note")
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
