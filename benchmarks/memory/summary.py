"""What processes that train a model built on meta hold, over what they have to."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import slug
from benchmarks.stored import Row, read_rows

MIB = 2**20


def facts() -> Iterator[tuple[str, float]]:
    rows = read_rows(Path(__file__).with_name("results.jsonl"))
    yield "model.mib", rows[0]["model"] / MIB
    for method in dict.fromkeys(row["method"] for row in rows):
        found = [row for row in rows if row["method"] == method]
        for row in found:
            name = f"{slug(method)}.{row['rank']}"
            yield f"{name}.held", held(row) / MIB
            yield f"{name}.counted", sum(row["account"].values()) / MIB
        ratios = [held(row) / sum(row["account"].values()) for row in found]
        yield f"{slug(method)}.most", max(ratios)
        yield f"{slug(method)}.most-mib", max(map(held, found)) / MIB


def held(row: Row) -> int:
    """The most that was resident, saving included, above what was before the model was built."""
    return int(row["saved"]["peak"] - row["before"]["rss"])


def tables() -> dict[str, str]:
    rows = read_rows(Path(__file__).with_name("results.jsonl"))
    lines = ["| method | process | at most, MiB | counted, MiB | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        counted = sum(row["account"].values())
        lines.append(
            f"| {row['method']} | {row['rank']} | {held(row) / MIB:.0f} | {counted / MIB:.0f}"
            f" | {held(row) / counted:.3f} |"
        )
    return {"processes": "\n".join(lines) + "\n"}
