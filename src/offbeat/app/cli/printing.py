"""How commands print: JSON, and columns that fit a terminal."""

import json
import sys

import typer


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_columns(lines: list[list[str]]) -> None:
    """Aligned columns; on a terminal rich folds the cells that do not fit."""
    if sys.stdout and sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False)
        for place, title in enumerate(lines[0]):
            grid.add_column(title, no_wrap=place < 4, overflow="fold")
        for line in lines[1:]:
            grid.add_row(*line)
        Console(highlight=False).print(grid)
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())
