"""The largest stable learning rates as a table: rate / (1 - momentum) x curvature, by lag."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import slug
from benchmarks.stored import read_result

PLAIN, UNCORRECTED = "momentum 0.9", ("SGD", "momentum 0.9")


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
    for lag, plain in thresholds()[PLAIN].items():
        singles = [r for r in thresholds() if r not in UNCORRECTED and "+" not in r]
        ratios = [thresholds()[rule][lag] / plain for rule in singles]
        yield f"single.{lag}.least", min(ratios)
        yield f"single.{lag}.most", max(ratios)


def tables() -> dict[str, str]:
    lags = list(next(iter(thresholds().values())))
    lines = [f"| rule | lag {' | '.join(lags)} |", "|---" * (len(lags) + 1) + "|"]
    for rule, by_lag in thresholds().items():
        lines.append(f"| {rule} | {' | '.join(f'{value:.3f}' for value in by_lag.values())} |")
    return {"thresholds": "\n".join(lines)}
