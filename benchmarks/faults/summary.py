"""What the drill and the returns came to, and what saving costs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.intervals import Interval, ratio
from benchmarks.stored import read_result, read_rows

FOLDER = Path(__file__).parent
COSTS = {
    "cost": "cost.jsonl",
    "lowest-priority": "cost-lowest-priority.jsonl",
    "through-the-cache": "cost-through-the-cache.jsonl",
}


def blocks(result: dict[str, Any], rule: str) -> Interval:
    """A block of steps with a checkpoint over the one without, round by round."""
    rows = [row for row in result["rounds"] if row["rule"] == rule]
    return ratio([row["with_s"] for row in rows], [row["without_s"] for row in rows])


def facts() -> Iterator[tuple[str, float | Interval]]:
    for seed in (3, 11):
        (summary,) = (
            row["summary"]
            for row in read_rows(FOLDER / f"drill-seed-{seed}.jsonl")
            if "summary" in row
        )
        for what in ("moments", "differing", "hung", "left_behind", "lost"):
            yield f"drill.{seed}.{what}", summary[what]
    returns = read_rows(FOLDER / "joining.jsonl")
    yield "returns.runs", len(returns)
    yield "returns.kills", sum(len(row["plan"]["kills"]) for row in returns)
    yield "returns.joined", sum(row["back"] for row in returns)
    for what in ("differing", "hung"):
        yield f"returns.{what}", sum(row[what] for row in returns)
    for name, file in COSTS.items():
        result = read_result(FOLDER / file)
        for rule, found in result["summary"].items():
            yield f"{name}.{rule}.blocks", blocks(result, rule)
            if "ratio_by_steps" in found:
                yield f"{name}.{rule}", found["ratio_by_steps"]


def tables() -> dict[str, str]:
    result = read_result(FOLDER / COSTS["cost"])
    lines = [
        "| rule | by steps | blocks, mean (95 %) | median | limit | checkpoint | until `save`"
        " returns |",
        "|---" * 7 + "|",
    ]
    for rule, found in result["summary"].items():
        lines.append(
            f"| `{rule}` | {found['ratio_by_steps']:.3f} | {blocks(result, rule):.3f}"
            f" | {found['median_ratio_of_blocks']:.3f} | {found['limit']:.2f}"
            f" | {found['bytes'] / 1e6:.0f} MB | {1000 * found['median_taken_s']:.0f} ms |"
        )
    return {"cost": "\n".join(lines), "fuzz": _damaged(), "long-run": _long_run()}


def _damaged() -> str:
    lines = ["| what is damaged | inputs | refused | equal | neither |", "|---" * 5 + "|"]
    for row in read_rows(FOLDER / "fuzz.jsonl"):
        counts = (f"{row[name]:,}" for name in ("inputs", "refused", "equal", "other"))
        lines.append(f"| {row['what'].replace('_', ' ')} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _long_run() -> str:
    lines = ["| steps | actions | memory | checkpoint | file of older actions |", "|---" * 5 + "|"]
    for row in read_rows(FOLDER / "long-run.jsonl"):
        sizes = (f"{row[name] / 1e6:.2f} MB" for name in ("checkpoint_bytes", "older_bytes"))
        cells = f"{row['steps']:,}", f"{row['actions']:,}", f"{row['memory_mb']:.0f} MB", *sizes
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
