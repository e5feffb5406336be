"""``offbeat report``: a page about stored runs."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.app.runs import CONFIG, Run


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of stored runs, or of a study.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where to write; RUN/report by default.")
    ] = None,
) -> None:
    """Write one page that explains what staleness did, and a trace of every run."""
    from offbeat.app.report import write_report

    stored = [Run.load(folder) for given in runs for folder in runs_in(Path(given))]
    page, *_ = write_report(stored, Path(out) if out is not None else Path(runs[0]) / "report")
    typer.echo(f"wrote {page}")


def runs_in(folder: Path) -> list[Path]:
    """The run itself, or those of a study."""
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    return [folder] if (folder / CONFIG).exists() or not inside else inside
