"""How commands print: JSON, and columns that fit a terminal."""

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

import typer

WIDTH = 80
"""Of what is no terminal."""
_GAP = "  "
_NARROWEST = 8
"""Columns; a column is not folded to less."""


def print_json(value: object) -> None:
    """JSON has no NaN and no infinity: they become null."""
    from offbeat.app.report.markup import finite

    typer.echo(json.dumps(finite(value), indent=2, allow_nan=False))


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    """Aligned columns, as wide as the terminal at most: what does not fit goes on below."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if terminal else WIDTH
    widths = _fitting([list(map(len, column)) for column in zip(*lines, strict=True)], width)
    for line in lines:
        folded = [textwrap.wrap(cell, w) or [""] for cell, w in zip(line, widths, strict=True)]
        for row in range(max(map(len, folded))):
            cells = [part[row] if row < len(part) else "" for part in folded]
            padded = (cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
            typer.echo(_GAP.join(padded).rstrip())


def _fitting(lengths: Sequence[Sequence[int]], width: int) -> list[int]:
    """The widths of columns: the widest gives way, column by column, but never the first."""
    widths = [max(of_column) for of_column in lengths]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        place = max(range(1, len(widths)), key=lambda k: widths[k], default=0)
        if not place or widths[place] <= _NARROWEST:
            break
        widths[place] -= 1
    return widths
