"""Speeds on one GPU as Markdown.

python -m benchmarks.one_gpu.summary benchmarks/one_gpu/results.jsonl

A ratio is taken turn by turn; its mean is the geometric one, with its 95 % interval. Some
contestants' turns come in two kinds, which a median hides: their mean stands beside it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.intervals import Interval, ratio
from benchmarks.pages import slug
from benchmarks.stored import Row, read_result, read_rows

FOLDER = Path(__file__).parent
BASES = {"eager": "eager", "graph": "graph", "compiled, graph": "compiled graph"}
COMPILED = "8 stages, lag K-1-k, stash, compiled"


def read(path: Path) -> dict[str, dict[str, Row]]:
    """Per workload its contestants; of the same contest, what was measured last."""
    found: dict[tuple[str, frozenset[str]], dict[str, Row]] = {}
    for result in read_rows(path):
        found[result["workload"], frozenset(result["rows"])] = result["rows"]
    named: dict[str, dict[str, Row]] = {}
    for (workload, _), rows in found.items():
        named[f"{workload}, once more" if workload in named else workload] = rows
    return named


def complete(row: Row) -> bool:
    """Whether it ran as meant: contestants that wait hold memory, and some found too little."""
    said = [row.get("error", ""), *row.get("messages", ())]
    return "ms" in row and not any("out of memory" in words for words in said)


def times(rows: dict[str, Row], name: str, base: str) -> Interval | None:
    """How many times as fast as the base, turn by turn."""
    if base not in rows or not complete(rows[base]):
        return None
    return ratio(rows[base]["turns"], rows[name]["turns"])


def facts() -> Iterator[tuple[str, float | Interval]]:
    compiled, shares = [], []
    for workload, rows in read(FOLDER / "results.jsonl").items():
        able = {name: row for name, row in rows.items() if complete(row)}
        yield from _facts_of(slug(workload), able)
        if found := COMPILED in able and times(able, COMPILED, "compiled, graph"):
            compiled.append(found.centre)
        for stages in (4, 8):
            long, short = (f"{stages} stages, lag {lag}" for lag in ("2(K-1-k)", "K-1-k"))
            if long in able and short in able:
                shares.append(100 * able[short]["memory_mib"] / able[long]["memory_mib"])
    yield from _ends("compiled", compiled)
    yield from _ends("share-of-memory", shares)
    cases = read_result(FOLDER / "bits.jsonl")["cases"]
    yield "bits.cases", len(cases)
    yield "bits.differing", sum(case["differing elements"] > 0 for case in cases)
    yield from _facts_of_training(read_rows(FOLDER / "training.jsonl"))


def _ends(name: str, values: list[float]) -> Iterator[tuple[str, float]]:
    yield f"{name}.least", min(values)
    yield f"{name}.most", max(values)


def _facts_of(workload: str, rows: dict[str, Row]) -> Iterator[tuple[str, float | Interval]]:
    for name, row in rows.items():
        key = f"{workload}.{slug(name)}"
        yield f"{key}.ms", row["ms"]
        yield f"{key}.mean-ms", fmean(row["turns"])
        yield f"{key}.gib", row["memory_mib"] / 1024
        for base, word in BASES.items():
            if found := times(rows, name, base):
                yield f"{key}.of.{slug(word)}", found
    for stages in (4, 8):
        some = [name for name in rows if name.startswith(f"{stages} stages") and name != COMPILED]
        if some:
            yield f"{workload}.{stages}-stages.ms", min(rows[name]["ms"] for name in some)


def _facts_of_training(rows: list[Row]) -> Iterator[tuple[str, float | Interval]]:
    for name in dict.fromkeys(row["run"] for row in rows):
        ends = [row["epochs"][-1] for row in rows if row["run"] == name]
        seconds = [end["seconds"] for end in ends]
        accuracies = [100 * end["accuracy"] for end in ends]
        for what, values in (("seconds", seconds), ("accuracy", accuracies)):
            yield f"training.{slug(name)}.{what}", fmean(values)
            yield from _ends(f"training.{slug(name)}.{what}", values)


def tables() -> dict[str, str]:
    return {"speeds": text_of(read(FOLDER / "results.jsonl")).strip()}


def table(rows: dict[str, Row]) -> Iterator[str]:
    heads = " | ".join(f"times {word}" for word in BASES.values())
    yield f"| contestant | ms a step, median | mean | quartiles | {heads} | GiB |"
    yield "|---" * (5 + len(BASES)) + "|"
    for name, row in rows.items():
        if not complete(row):
            why = "ran out of memory beside the others" if "ms" in row else row["error"]
            yield f"| {name} | {why.splitlines()[0][:80]}" + " |" * (4 + len(BASES))
            continue
        low, high = row["quartiles"]
        cells = [name, f"{row['ms']:.2f}", f"{fmean(row['turns']):.2f}", f"{low:.2f} to {high:.2f}"]
        for base in BASES:
            found = times(rows, name, base)
            cells.append("" if found is None else "1" if name == base else f"{found:.2f}")
        yield f"| {' | '.join(cells)} | {row['memory_mib'] / 1024:.1f} |"


def text_of(found: dict[str, dict[str, Row]]) -> str:
    parts = (f"### {workload}\n\n" + "\n".join(table(rows)) for workload, rows in found.items())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(text_of(read(Path(sys.argv[1]))), end="")
