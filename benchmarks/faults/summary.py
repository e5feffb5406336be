"""What the drill and the returns came to, and what saving costs."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults import storm
from benchmarks.intervals import Interval, ratio
from benchmarks.pages import slug
from benchmarks.stored import read_result, read_rows

DRILLS = {"3": "drill-seed-3.jsonl", "11": "drill-seed-11.jsonl", "21": "drill-more-seed-21.jsonl"}
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
    for seed, file in DRILLS.items():
        (summary,) = (row["summary"] for row in read_rows(FOLDER / file) if "summary" in row)
        for what in ("moments", "differing", "hung", "left_behind", "lost"):
            yield f"drill.{seed}.{what}", summary[what]
    for name, value in storm_facts():
        yield f"storm.{name}", value
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


def storm_facts() -> Iterator[tuple[str, float]]:
    """What is a number in the summary of the storm, by the names that lead there."""
    for name, value in storm.summary(read_rows(FOLDER / "storm.jsonl")).items():
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            if part is not None:
                yield slug(f"{name}.{key}" if key else name), float(part)


def storm_table() -> str:
    """Run by run: what a storm did to it, beside the calm run of its setting."""
    rows = read_rows(FOLDER / "storm.jsonl")
    found = storm.summary(rows)
    lines = [
        "| run | faults | averages | of the calm run's | mean part | all in it | back, median"
        " | loss (calm) |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        if row["plan"]["storm"] != "storm":
            continue
        of = found[f"{storm.setting_of(row)}.{row['plan']['seed']}"]
        back = [fault["back_s"] for fault in row["faults"] if "back_s" in fault]
        once = f", killed whole once ({of['down_s']:.0f} s)" if row["whole"] else ""
        share = "-" if of["of_calm"] is None else f"{100 * of['of_calm']:.1f} %"
        calm = "-" if of["calm_loss"] is None else f"{of['calm_loss']:.3f}"
        lines.append(
            f"| {storm.setting_of(row)}, seed {row['plan']['seed']}{once}"
            f" | {sum(fault['hit'] for fault in row['faults'])} | {of['averages']} | {share}"
            f" | {of['parts']:.2f} of {row['plan']['replicas']} | {100 * of['full']:.0f} %"
            f" | {f'{median(back):.1f} s' if back else '-'} | {of['loss'] or 0:.3f} ({calm}) |"
        )
    return "\n".join(lines)


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
    more = {"storm": storm_table(), "fuzz": _damaged(), "long-run": _long_run()}
    return {"cost": "\n".join(lines), **more}


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
