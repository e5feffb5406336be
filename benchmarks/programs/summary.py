"""What became of random programs."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.stored import read_rows


def facts() -> Iterator[tuple[str, float]]:
    rows = read_rows(Path(__file__).with_name("results.jsonl"))
    for name in ("exact", "refused", "wrong"):
        yield name, sum(row[name] for row in rows)
    yield "examples", sum(row[name] for row in rows for name in ("exact", "refused", "wrong"))
    yield "seeds", len(rows)
