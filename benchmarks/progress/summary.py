"""What the live view and the stored metrics cost, in percent of the time of the steps."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.stored import read_result


def facts() -> Iterator[tuple[str, float]]:
    yield "share", 100 * read_result(Path(__file__).with_name("results.json"))["share"]
