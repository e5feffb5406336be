"""``offbeat report``: a page about stored runs."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.runs import CONFIG, Run
from offbeat.errors import MissingExtra


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of stored runs, or of a study.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where to write; RUN/report by default.")
    ] = None,
) -> None:
    """Write one page that explains what staleness did, with every figure and a trace."""
    from offbeat.app.report import write_report

    found = [Run.load(folder) for given in runs for folder in runs_in(Path(given))]
    folder = Path(out) if out is not None else Path(runs[0]) / "report"
    try:
        written = write_report(found, folder)
    except MissingExtra as error:
        typer.echo(f"page written, but no pictures: {error}", err=True)
        written = [folder / "report.html"]
    typer.echo(f"wrote {next(path for path in written if path.name == 'report.html')}")


def runs_in(folder: Path) -> list[Path]:
    """The run itself, or those of a study."""
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    return [folder] if (folder / CONFIG).exists() or not inside else inside
