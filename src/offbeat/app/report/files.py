"""The report as files: the page, its figures, a trace per run."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.app.report.facts import Facts, facts_of
from offbeat.app.report.page import page
from offbeat.app.report.plots import figures_of
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError
from offbeat.records.ledger import Ledger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
_FORMATS = ("png", "svg")


def write_report(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Writes ``report.html``, traces and figures into a folder, and returns what was written.

    Files of an earlier report are replaced. Without matplotlib the page and the traces are written,
    then :class:`offbeat.errors.MissingExtra` is raised.
    """
    folder = Path(folder)
    # A folder's name may hold bytes that are no text; they come as lone surrogates.
    written = [_write(folder / PAGE, page(runs).encode(errors="replace"))]
    for name, ledger in _traces(facts_of(runs)):
        trace = json.dumps(ledger.chrome_trace(), separators=(",", ":"))
        written.append(_write(folder / name, trace.encode()))
    for name, figure in figures_of(runs).items():
        written += [_write(folder / f"{name}.{form}", _drawn(figure, form)) for form in _FORMATS]
    return written


def _traces(facts: Sequence[Facts]) -> Iterator[tuple[str, Ledger]]:
    """File names: ``trace.json`` for one run, otherwise one per run by its label."""
    taken: set[str] = set()
    for run in facts:
        if run.ledger is None:
            continue
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", run.label).strip("-.")[:80] or "run"
        name = "trace.json" if len(facts) == 1 else f"trace-{word}.json"
        while name.lower() in taken:
            name = name.replace(".json", "-2.json")
        taken.add(name.lower())
        yield name, run.ledger


def _drawn(figure: "Figure", form: str) -> bytes:
    """The same bytes for the same runs: no date, and fixed names inside an SVG."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "offbeat"}):
        kept = {"Date": None} if form == "svg" else None
        figure.savefig(buffer, format=form, metadata=kept)
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. Give another folder (--out)."
        ) from None
    return path
