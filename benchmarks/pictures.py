"""What the pictures of the benchmarks share: ink, plain axes, and a command that draws one."""

import argparse
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#444444"


def plain(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def command(draw: Callable[[Path], Figure], words: str | None, *, dpi: int) -> None:
    """Draws the stored results that are named, beside them if no other place is."""
    parser = argparse.ArgumentParser(description=words.split("\n")[0] if words else None)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="by default beside the results")
    given = parser.parse_args()
    out = given.out or given.results.with_suffix(".png")
    draw(given.results).savefig(out, dpi=dpi)
    print(out)
