"""How many methods gave other bits in processes that share a GPU."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.stored import read_result


def facts() -> Iterator[tuple[str, float]]:
    rows = read_result(Path(__file__).with_name("results.json"))["rows"]
    yield "cases", len(rows)
    yield "differing", sum(row["differing_elements"] > 0 for row in rows)
