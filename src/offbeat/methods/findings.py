"""What has been measured, and the limits and words of ``auto`` that follow: ``findings.toml``."""

import tomllib
from functools import cache
from math import inf
from pathlib import Path
from typing import Any


@cache
def load() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def limit(name: str) -> Any:
    """What bounds the choice of ``auto``: rows and parts, and how late parts may be."""
    return load()["limits"][name]


def sentence(name: str, **facts: object) -> str:
    """A sentence with the figures of the findings and the facts of the case at hand in it."""
    figures = {key: finding["figures"] for key, finding in load()["findings"].items()}
    text: str = load()["sentences"][name]
    return text.format(**figures, **facts)


def corrections_for(optimizer: str, lag: int, *, on_time: bool) -> tuple[tuple[str, ...], str]:
    """Those of the first rule that fits an optimizer and a first stage, by name, and why."""
    rule = next(
        rule
        for rule in load()["corrections"]
        if optimizer in rule["optimizers"]
        and lag <= rule.get("most_lag", inf)
        and (on_time or not rule.get("on_time"))
    )
    return tuple(rule["take"]), sentence(rule["reason"], lag=lag)
