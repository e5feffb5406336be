"""The command line: what trains, what looks at a run or ahead, and what there is to choose from.

Only a command that trains or lists what is written in torch may import it, and only when it runs,
so that every other answer, help included, is there at once.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from offbeat import __version__
from offbeat.app.cli import listing, report, schedule, study, train, verify
from offbeat.app.cli.help import GroupedCommand, GroupedCommands
from offbeat.errors import OffbeatError

app = typer.Typer(
    cls=GroupedCommands,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (train.train, study.study),
    "Look at what happened": (report.report, verify.verify),
    "Look ahead": (schedule.schedule, schedule.timeline),
    "What there is to choose from": (
        listing.methods,
        listing.corrections,
        listing.averagings,
        listing.models,
        listing.data,
    ),
}
for _heading, _group in _COMMANDS.items():
    for _command in _group:
        app.command(cls=GroupedCommand, rich_help_panel=_heading)(_command)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Asynchronous training for PyTorch: which stage does what, when, and how late."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one message on stderr and exit code 2."""
    shown, warnings.formatwarning = warnings.formatwarning, _in_one_line
    try:
        app(args=argv, prog_name="offbeat")
    except OffbeatError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)
    finally:
        warnings.formatwarning = shown


def _in_one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning without the place in this library that gives it."""
    return f"Warning: {message}\n"
