"""The table of speeds as Markdown.

python -m benchmarks.one_gpu.summary benchmarks/one_gpu/results.jsonl
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BASES = ("eager", "graph", "compiled, graph")


def read(path: Path) -> dict[str, dict[str, Row]]:
    """Per workload its contestants; of the same contest, what was measured last."""
    found: dict[tuple[str, frozenset[str]], dict[str, Row]] = {}
    for line in path.read_text().splitlines():
        result = json.loads(line)
        found[result["workload"], frozenset(result["rows"])] = result["rows"]
    named: dict[str, dict[str, Row]] = {}
    for (workload, _), rows in found.items():
        named[f"{workload}, once more" if workload in named else workload] = rows
    return named


def complete(row: Row) -> bool:
    """Whether it ran as meant: contestants that wait hold memory, and some found too little."""
    said = [row.get("error", ""), *row.get("messages", ())]
    return "ms" in row and not any("out of memory" in words for words in said)


def table(rows: dict[str, Row]) -> Iterator[str]:
    yield "| contestant | ms a step | quartiles | times eager | times graph | times compiled graph"
    yield "|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        if not complete(row):
            why = "ran out of memory beside the others" if "ms" in row else row["error"]
            yield f"| {name} | {why.splitlines()[0][:80]} | | | | | |"
            continue
        low, high = row["quartiles"]
        ratios = [
            f"{rows[base]['ms'] / row['ms']:.2f}" if base in rows and complete(rows[base]) else ""
            for base in BASES
        ]
        cells = [name, f"{row['ms']:.2f}", f"{low:.2f} to {high:.2f}", *ratios]
        yield f"| {' | '.join(cells)} | {row['memory_mib'] / 1024:.1f} |"


def text_of(found: dict[str, dict[str, Row]]) -> str:
    parts = []
    for workload, rows in found.items():
        head, *lines = table(rows)
        parts.append("\n".join([f"### {workload}", "", f"{head} | GiB |", *lines]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Speeds on one GPU as Markdown.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="by default printed")
    arguments = parser.parse_args()
    text = text_of(read(arguments.results))
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
