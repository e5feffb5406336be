"""Numbers from raw results: what is printed, tabulated and drawn is computed here and nowhere else.

    python -m benchmarks.two_cores.summary benchmarks/two_cores/results.jsonl

prints, model by model, all contestants and how ours stand beside the others. A ratio is taken
within a round; its mean over rounds is the geometric one, with its 95 % interval.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.intervals import Interval, ratio, unpaired_ratio, verdict
from benchmarks.pages import slug
from benchmarks.stored import read_result
from benchmarks.two_cores.variants import Family, all_variants

FOLDER = Path(__file__).parent
FILES = {"": "results.jsonl", "first.": "first.jsonl"}
"""What is stored, by the beginning of its facts' names."""
TITLES = {"resnet20": "ResNet-20", "alexnet": "AlexNet 32x32", "transformer": "small transformer"}
RIVALS = {
    "ddp": ("ddp", "DDP at its best"),
    "threads": ("two-threads", "one process, 2 threads"),
    "torch": ("torch-", "`torch.distributed.pipelining` at its best"),
}
"""Whom ours are compared with, each at its fastest: what names begin with, and words."""

Rounds = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contestant's result over all rounds it took part in."""

    name: str
    label: str
    family: Family
    times_one_core: Interval
    median: float
    """Of the same ratios."""
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


def rows(result: dict[str, Any]) -> list[Row]:
    """Every contestant, fastest first."""
    found = []
    for variant in all_variants():
        rounds = [seconds for seconds in all_rounds(result) if variant.name in seconds]
        if not rounds:
            continue
        one, own = ([s[name] for s in rounds] for name in ("one-core", variant.name))
        found.append(
            Row(
                name=variant.name,
                label=variant.label,
                family=variant.family,
                times_one_core=ratio(one, own),
                median=statistics.median(a / b for a, b in zip(one, own, strict=True)),
                seconds=statistics.median(own),
            )
        )
    return sorted(found, key=lambda row: -row.times_one_core.centre)


def times(result: dict[str, Any], ours: str, theirs: str) -> tuple[Interval, bool]:
    """How many times as fast we are, and whether both ran in the same rounds.

    Where they did not, each is compared with one core of its own rounds.
    """
    rounds = all_rounds(result)
    shared = [seconds for seconds in rounds if ours in seconds and theirs in seconds]
    if shared:
        return ratio([s[theirs] for s in shared], [s[ours] for s in shared]), True
    speeds = [[s["one-core"] / s[name] for s in rounds if name in s] for name in (ours, theirs)]
    return unpaired_ratio(*speeds), False


def slowest_stage(seconds: dict[str, float]) -> float:
    """No pipeline over this cut can take less per batch than its slowest stage alone."""
    return max(seconds["stage-0"], seconds["stage-1"])


def balance(result: dict[str, Any]) -> Interval:
    """What the balance of the cut allows: both stages' time by that of the slower, at most 2."""
    rounds = all_rounds(result)
    both = [seconds["stage-0"] + seconds["stage-1"] for seconds in rounds]
    return ratio(both, [slowest_stage(seconds) for seconds in rounds])


def of_balance(result: dict[str, Any], name: str) -> Interval:
    """How much of what the balance of the cut allows a contestant reaches."""
    rounds = [seconds for seconds in all_rounds(result) if name in seconds]
    allowed = [(s["stage-0"] + s["stage-1"]) / slowest_stage(s) for s in rounds]
    return ratio(
        [s["one-core"] for s in rounds],
        [s[name] * share for s, share in zip(rounds, allowed, strict=True)],
    )


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


# ---------------------------------------------------------------- numbers and words


def facts() -> Iterator[tuple[str, float | Interval]]:
    for prefix, file in FILES.items():
        for model, result in read_result(FOLDER / file).items():
            yield from _facts_of(f"{prefix}{model}", result)


def _facts_of(model: str, result: dict[str, Any]) -> Iterator[tuple[str, float | Interval]]:
    every = rows(result)
    for row in every:
        name = f"{model}.{short(row)}"
        yield name, row.times_one_core
        yield f"{name}.median", row.median
        yield f"{name}.ms", 1000 * row.seconds
    for key, (prefix, _) in RIVALS.items():
        if rival := best(result, prefix):
            yield f"{model}.best-{key}", rival.times_one_core
            for row in every:
                if row.family == "asynchronous":
                    found, _ = times(result, row.name, rival.name)
                    yield f"{model}.{short(row)}.of.{key}", found
    yield f"{model}.cut-allows", balance(result)
    for name in ("both-stages", "offbeat-stale-weights"):
        yield f"{model}.{name.removeprefix('offbeat-')}.of.cut", of_balance(result, name)
    shares = [100 * share for share in foreign_shares(result)]
    yield f"{model}.others-took", statistics.median(shares)
    yield f"{model}.others-took.most", max(shares)


def short(row: Row) -> str:
    return slug(row.name.removeprefix("offbeat-"))


def tables() -> dict[str, str]:
    return {"rivals": rivals(read_result(FOLDER / FILES[""]))}


def rivals(results: dict[str, Any]) -> str:
    """How our fastest asynchronous method and StaleWeights do beside each rival at its fastest."""
    heads = [words for _, words in RIVALS.values()]
    lines = [f"| | times one core | times {' | times '.join(heads)} |", "|---" * 5 + "|"]
    for model, result in results.items():
        found = (best(result, family="asynchronous"), best(result, "offbeat-stale-weights"))
        for own in dict.fromkeys(row for row in found if row is not None):
            beside = [_beside(result, own, best(result, prefix)) for prefix, _ in RIVALS.values()]
            label = f"{TITLES[model]}, {own.label.removeprefix('offbeat ')}"
            lines.append(f"| {label} | {own.times_one_core:.2f} | {' | '.join(beside)} |")
    return "\n".join(lines)


def _beside(result: dict[str, Any], own: Row, rival: Row | None) -> str:
    if rival is None:
        return ""
    found, paired = times(result, own.name, rival.name)
    other = "" if paired else ", other rounds"
    return f"{found:.2f} {verdict(found.values)}; {rival.label}{other}"


def markdown(model: str, result: dict[str, Any]) -> str:
    failed = {name: why for wave in result["waves"] for name, why in wave["failed"].items()}
    lines = [
        f"**{model}**: {result['parameters'] / 1e6:.2f} M parameters, batch {result['batch']},"
        f" cut at child {result['cuts']['two'][0]} of {result['costs']['children']}; the balance"
        f" of the cut allows {balance(result):.2f} times one core. Others took"
        f" {statistics.median(foreign_shares(result)):.1%} of the machine (median turn),"
        f" {max(foreign_shares(result)):.1%} in the worst turn.",
        "",
        "| contestant | times one core, mean (95 %) | median | ms per batch |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.label} | {row.times_one_core:.2f} | {row.median:.2f} | {1000 * row.seconds:.0f} |"
        for row in rows(result)
        if not row.name.startswith("stage-")
    ]
    lines += [f"\n`{name}` is out: {why}" for name, why in failed.items()]
    return "\n".join([*lines, "", rivals({model: result})])


def main() -> None:
    for model, result in read_result(Path(sys.argv[1])).items():
        say(f"{markdown(model, result)}\n")


if __name__ == "__main__":
    main()
