"""``offbeat report``: a page about stored runs."""

import time
from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.cli.options import Json
from offbeat.app.cli.printing import print_json
from offbeat.app.runs import CONFIG, Run

EVERY_S = 5
"""Between two pages about a run that goes on."""


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of stored runs, or of a study.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where to write; RUN/report by default.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Write the page anew while a run goes on; it loads itself again."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one page that explains what staleness did, and a trace of every run."""
    from offbeat.app.report import write_report

    folder = Path(out) if out is not None else Path(runs[0]) / "report"
    told = False
    while True:
        stored = [Run.load(each) for given in runs for each in runs_in(Path(given))]
        goes_on = follow and any(run.goes_on for run in stored)
        written = write_report(stored, folder, EVERY_S if goes_on else None)
        if not goes_on:
            break
        if not told:
            typer.echo(f"following in {written[0]}: Ctrl-C ends this, not the run", err=True)
            told = True
        try:
            time.sleep(EVERY_S)
        except KeyboardInterrupt:
            written = write_report(stored, folder)
            break
    if as_json:
        print_json({"written": [str(path) for path in written]})
    else:
        typer.echo(f"wrote {written[0]}")


def runs_in(folder: Path) -> list[Path]:
    """The run itself, or those of a study."""
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    return [folder] if (folder / CONFIG).exists() or not inside else inside
