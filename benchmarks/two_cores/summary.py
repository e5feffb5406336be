"""Numbers from raw results: what is printed, tabulated and drawn is computed here and nowhere else.

    python -m benchmarks.two_cores.summary benchmarks/two_cores/results.json

prints the tables of the README and whether each claim holds.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.two_cores.variants import Family, all_variants

Rounds = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contestant's result: how many times one core, over all rounds it took part in."""

    name: str
    label: str
    family: Family
    times_one_core: float
    low: float
    high: float
    """First and third quartile over the rounds."""
    seconds: float
    """Median seconds per batch."""


def say(text: str) -> None:
    print(text, flush=True)


def all_rounds(result: dict[str, Any]) -> Rounds:
    """Seconds per batch of every contestant, round by round, over all waves."""
    return [
        {name: turn["seconds"] for name, turn in turns.items()}
        for wave in result["waves"]
        for turns in wave["rounds"]
    ]


def foreign_shares(result: dict[str, Any]) -> list[float]:
    """What others took of the machine, turn by turn."""
    return [
        turn["foreign_share"]
        for wave in result["waves"]
        for turns in wave["rounds"]
        for turn in turns.values()
    ]


def median_of(rounds: Rounds, value: Callable[[dict[str, float]], float]) -> float:
    return statistics.median(value(seconds) for seconds in rounds)


def rows(result: dict[str, Any]) -> list[Row]:
    """Every contestant, fastest first. A ratio is taken within a round, then the median."""
    found = []
    for variant in all_variants():
        rounds = [seconds for seconds in all_rounds(result) if variant.name in seconds]
        if not rounds:
            continue
        ratios = [seconds["one-core"] / seconds[variant.name] for seconds in rounds]
        spread = (
            statistics.quantiles(ratios, n=4, method="inclusive")
            if len(ratios) > 1
            else [ratios[0]] * 3
        )
        found.append(
            Row(
                name=variant.name,
                label=variant.label,
                family=variant.family,
                times_one_core=statistics.median(ratios),
                low=spread[0],
                high=spread[2],
                seconds=median_of(rounds, lambda s, name=variant.name: s[name]),  # type: ignore[misc]
            )
        )
    return sorted(found, key=lambda row: -row.times_one_core)


def slowest_stage(seconds: dict[str, float]) -> float:
    """No pipeline over this cut can take less per batch than its slowest stage alone."""
    return max(seconds["stage-0"], seconds["stage-1"])


def balance(result: dict[str, Any]) -> float:
    """What the balance of the cut allows: both stages' time by that of the slower, at most 2."""
    return median_of(all_rounds(result), lambda s: (s["stage-0"] + s["stage-1"]) / slowest_stage(s))


def share_of_slowest(result: dict[str, Any], name: str, *, alone: bool) -> float:
    """How much of a contestant's step its slowest stage would need.

    ``alone``: with the other core idle; otherwise with both stages at work, but no messages.
    """
    rounds = [seconds for seconds in all_rounds(result) if name in seconds]
    return median_of(rounds, lambda s: (slowest_stage(s) if alone else s["both-stages"]) / s[name])


def best(result: dict[str, Any], *prefixes: str, family: Family | None = None) -> Row | None:
    """The fastest contestant with such a name or of such a family."""
    return next(
        (
            row
            for row in rows(result)
            if (family is None or row.family == family)
            and (not prefixes or row.name.startswith(prefixes))
        ),
        None,
    )


def headline(result: dict[str, Any]) -> list[Row]:
    """One row per way to train: of its settings (micro-batches, DDP's options) the fastest."""
    kept: dict[str, Row] = {}
    for row in rows(result):
        if row.family in ("unit", "bound"):
            continue
        way = row.name.rstrip("0123456789")
        kept.setdefault("ddp" if row.name.startswith("ddp") else way, row)
    return list(kept.values())


# ---------------------------------------------------------------- words


def markdown(model: str, result: dict[str, Any]) -> str:
    failed = {name: why for wave in result["waves"] for name, why in wave["failed"].items()}
    lines = [
        f"**{model}**: {result['parameters'] / 1e6:.2f} M parameters, batch {result['batch']},"
        f" cut at child {result['cuts']['two'][0]} of {result['costs']['children']}; the balance"
        f" of the cut allows {balance(result):.2f} times one core.",
        "",
        "| contestant | times one core | quartiles | ms per batch |",
        "|---|---|---|---|",
    ]
    for row in rows(result):
        if row.name.startswith("stage-"):
            continue
        lines.append(
            f"| {row.label} | {row.times_one_core:.2f} | {row.low:.2f} to {row.high:.2f}"
            f" | {1000 * row.seconds:.0f} |"
        )
    lines += [f"\n`{name}` is out: {why}" for name, why in failed.items()]
    return "\n".join(lines)


def claims(model: str, result: dict[str, Any]) -> list[str]:
    """Every claim about a model with its number, its limit and whether it holds."""
    ours = best(result, family="asynchronous")
    if ours is None:
        return []
    found = [
        f"fastest asynchronous method: {ours.label}, {ours.times_one_core:.3f} times one core",
        f"others took {statistics.median(foreign_shares(result)):.1%} of the machine (median turn),"
        f" {max(foreign_shares(result)):.1%} in the worst turn",
        f"its slowest stage takes {share_of_slowest(result, ours.name, alone=True):.3f} of its step"
        f" alone, {share_of_slowest(result, ours.name, alone=False):.3f} beside the other stage",
    ]
    on_resnet, on_alexnet = model == "resnet20", model == "alexnet"
    if on_resnet:
        found.append(_claim("times one core", ours.times_one_core, 1.90))
    words = f"of the {balance(result):.3f} that the balance of the cut allows"
    share = ours.times_one_core / balance(result)
    found.append(_claim(words, share, 0.97 if on_resnet else None))
    limits = {
        "torch-": ("torch.distributed.pipelining", 1.10 if on_resnet else 1.0),
        "ddp": ("DDP", 1.25 if on_alexnet else 0.97),
        "two-threads": ("2 threads", 1.0 if on_alexnet else 0.97),
    }
    for prefix, (title, limit) in limits.items():
        rival = best(result, prefix)
        if rival is not None:
            ratio = ours.times_one_core / rival.times_one_core
            words = f"times {title} at its best ({rival.label}, {rival.times_one_core:.3f})"
            found.append(_claim(words, ratio, limit if on_resnet or on_alexnet else None))
    return found


def _claim(words: str, value: float, limit: float | None) -> str:
    if limit is None:
        return f"{value:.3f} {words}"
    return f"{value:.3f} {words}; at least {limit:.2f}: {'yes' if value >= limit else 'NO'}"


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    for model, result in results.items():
        say(f"{markdown(model, result)}\n")
        say("\n".join(f"- {claim}" for claim in claims(model, result)) + "\n")


if __name__ == "__main__":
    main()
