"""The largest stable learning rates as a table: rate / (1 - momentum) x curvature, by lag."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import slug
from benchmarks.stored import read_result


def thresholds() -> dict[str, dict[str, float]]:
    """By rule and lag."""
    found: dict[str, dict[str, float]] = read_result(Path(__file__).with_name("results.json"))[
        "thresholds"
    ]
    return found


def facts() -> Iterator[tuple[str, float]]:
    for rule, by_lag in thresholds().items():
        for lag, value in by_lag.items():
            yield f"{slug(rule)}.{lag}", value


def tables() -> dict[str, str]:
    lags = list(next(iter(thresholds().values())))
    lines = [f"| rule | lag {' | '.join(lags)} |", "|---" * (len(lags) + 1) + "|"]
    for rule, by_lag in thresholds().items():
        lines.append(f"| {rule} | {' | '.join(f'{value:.3f}' for value in by_lag.values())} |")
    return {"thresholds": "\n".join(lines)}
