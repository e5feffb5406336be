"""``offbeat verify``: whether a stored run is what it says."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.cli.options import Json
from offbeat.app.cli.printing import print_json


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or of checkpoints.")],
    as_json: Json = False,
) -> None:
    """Check a run's certificate: measured lags against declared ones, digests against files."""
    from offbeat.app.verification import verify_run

    findings = list(verify_run(Path(run)))
    if as_json:
        print_json([{"holds": holds, "finding": words} for holds, words in findings])
    for holds, words in [] if as_json else findings:
        typer.echo(f"{'ok   ' if holds else 'WRONG'} {words}")
    if not all(holds for holds, _ in findings):
        sys.exit(1)
