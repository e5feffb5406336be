"""Where the networks of the stale-weights paper stand after their twelve updates."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import slug
from benchmarks.stored import read_result


def facts() -> Iterator[tuple[str, float]]:
    for network, found in read_result(Path(__file__).with_name("results.json")).items():
        yield f"{slug(network)}.loss", found["loss"]
