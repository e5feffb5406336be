"""One HTML file about one run or several: it opens offline, and asks nobody for anything.

Beside it lies a trace per run, for Perfetto.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from offbeat.app.report.cases import cases_of
from offbeat.app.report.comparison import Comparison
from offbeat.app.report.curves import columns_of, curves, front_of
from offbeat.app.report.facts import Facts, facts_of
from offbeat.app.report.markup import Markup, data_block, join, tag
from offbeat.app.report.pace import waiting
from offbeat.app.report.stages import gradients, lags, memory, sizes, staleness
from offbeat.app.report.summary import configuration_table, summary
from offbeat.app.report.timelines import Drawing, timelines
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError
from offbeat.records import disk
from offbeat.records.ledger import Ledger

PAGE = "report.html"

_SCRIPTS = ("curves.js", "timeline.js", "page.js")


def write_report(runs: Sequence[Run], folder: Path, refresh_s: int | None = None) -> list[Path]:
    """Writes ``report.html`` and traces into a folder, and returns what was written.

    Files of an earlier report are replaced. ``refresh_s``: see :func:`page`.
    """
    # A folder's name may hold bytes that are no text; they come as lone surrogates.
    contents = {PAGE: page(runs, refresh_s).encode(errors="replace")}
    for name, ledger in _traces(facts_of(runs)):
        contents[name] = json.dumps(ledger.chrome_trace(), separators=(",", ":")).encode()
    for name, content in contents.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            disk.write(folder / name, [content])
        except OSError as error:
            words = error.strerror or error
            raise ConfigurationError(
                f"{folder / name} cannot be written: {words}. Give another folder (--out)."
            ) from None
    return [folder / name for name in contents]


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


def page(runs: Sequence[Run], refresh_s: int | None = None) -> str:
    """The report of these runs as one HTML document.

    A pure function of the stored runs; parts that a run does not have are said to be missing.
    ``refresh_s``: it loads itself again after so many seconds, for runs that go on.
    """
    if not runs:
        raise ConfigurationError("page() got no runs: give at least one.")
    facts = facts_of(runs)
    cases = cases_of(facts)
    drawings: list[Drawing] = []
    compared = Comparison(facts, cases) if len(facts) > 1 else None
    sections = {
        "Verdict": summary(cases, compared),
        "Comparison": None if compared is None else compared.show(),
        "Curves": curves(cases),
        "Stages": sizes(cases),
        "Timeline": timelines(cases, drawings),
        "Lag": lags(cases),
        "Staleness": staleness(cases) if any(run.readings for run in facts) else None,
        "Gradients": gradients(cases) if any(run.guarded for run in facts) else None,
        "Memory": memory(cases),
        "Waiting and stragglers": waiting(cases),
        "Configuration": configuration_table(cases),
        "How to read this page": Markup(_static("reading.html")),
    }
    shown = {title: content for title, content in sections.items() if content is not None}
    data = {
        "curves": [columns_of(case) for case in cases],
        "front": front_of(cases),
        "timelines": [drawing.columns() for drawing in drawings],
        "refresh": refresh_s,
    }
    title = facts[0].label if len(facts) == 1 else f"{len(facts)} runs compared"
    main = tag("main", *(_section(name, content) for name, content in shown.items()))
    header = _header(title, list(shown), refresh_s)
    return _document(title, join([header, main, data_block("data", data)]))


def _header(title: str, sections: Sequence[str], refresh_s: int | None) -> Markup:
    live = None
    if refresh_s is not None:
        live = tag(
            "p",
            tag("span", f"The run goes on. This page is written anew every {refresh_s} s. "),
            tag("button", "pause", type="button", data_live="on"),
            class_="live",
        )
    links = [tag("a", name, href=f"#{_anchor(name)}") for name in sections]
    return tag(
        "header",
        tag("p", "offbeat report", class_="kind"),
        tag("h1", title),
        live,
        tag("nav", *links, aria_label="Parts of this page"),
        tag("noscript", tag("p", "Curves and timelines need JavaScript; tables do not.")),
    )


def _section(title: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title), content, id=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _document(title: str, body: Markup) -> str:
    script = "".join(_static(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script runs but this very one, whatever a name may contain.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", f"{title} - offbeat report"),
        tag("style", Markup(_static("page.css"))),
    ]
    content = tag("body", body, tag("script", Markup(script)))
    return f"<!doctype html>\n{tag('html', tag('head', *head), content, lang='en')}\n"


def _static(name: str) -> str:
    return (files("offbeat.app.report") / "static" / name).read_text(encoding="utf-8")
