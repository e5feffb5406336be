"""One HTML file about one run or several: it opens offline, and asks nobody for anything."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from offbeat.app.report.actions import Drawing
from offbeat.app.report.bars import lags, memory, waiting
from offbeat.app.report.configuration import configuration_table
from offbeat.app.report.curves import columns_of, curves
from offbeat.app.report.facts import facts_of
from offbeat.app.report.gradients import gradients
from offbeat.app.report.markup import Markup, data_block, join, tag
from offbeat.app.report.reading import reading
from offbeat.app.report.staleness import staleness
from offbeat.app.report.summary import comparison, summary
from offbeat.app.report.timelines import timelines
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError

_SCRIPTS = ("curves.js", "timeline.js", "page.js")


def page(runs: Sequence[Run]) -> str:
    """The report of these runs as one HTML document.

    A pure function of the stored runs; parts that a run does not have are said to be missing.
    """
    if not runs:
        raise ConfigurationError("page() got no runs: give at least one.")
    facts = facts_of(runs)
    drawings: list[Drawing] = []
    sections = {
        "Summary": summary(facts),
        "Comparison": comparison(facts) if len(facts) > 1 else None,
        "Curves": curves(facts),
        "Timeline": timelines(facts, drawings),
        "Lag": lags(facts),
        "Staleness": staleness(facts) if any(run.readings for run in facts) else None,
        "Gradients": gradients(facts) if any(run.guarded for run in facts) else None,
        "Memory": memory(facts),
        "Waiting": waiting(facts),
        "Configuration": configuration_table(facts),
        "How to read this page": reading(),
    }
    shown = {title: content for title, content in sections.items() if content is not None}
    data = {
        "curves": [columns_of(run) for run in facts],
        "timelines": [drawing.columns() for drawing in drawings],
    }
    title = facts[0].label if len(facts) == 1 else f"{len(facts)} runs compared"
    main = tag("main", *(_section(name, content) for name, content in shown.items()))
    return _document(title, join([_header(title, list(shown)), main, data_block("data", data)]))


def _header(title: str, sections: Sequence[str]) -> Markup:
    links = [tag("a", name, href=f"#{_anchor(name)}") for name in sections]
    return tag(
        "header",
        tag("p", "offbeat report", class_="kind"),
        tag("h1", title),
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
