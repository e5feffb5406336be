"""What several sections of the page share."""

from collections.abc import Callable, Sequence

from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, join, tag

COLOURS = 7
"""Run colours in the style sheet; with the dashes they tell 28 runs apart."""
DASHES = ("", "7 4", "8 3 2 3", "2 3")


def note(text: str) -> Markup:
    return tag("p", text, class_="note")


def per_run(facts: Sequence[Facts], part: Callable[[Facts], object]) -> Markup:
    """A part of every run, under its name where there are several."""
    blocks = []
    for place, run in enumerate(facts):
        heading = tag("h3", swatch(place), run.label) if len(facts) > 1 else None
        blocks.append(tag("div", heading, part(run), class_="run"))
    return join(blocks)


def swatch(place: int) -> Markup:
    line = tag(
        "line", x1="1", x2="25", y1="6", y2="6",
        class_=f"line run-{place % COLOURS}",
        stroke_dasharray=DASHES[place % len(DASHES)] or None,
    )  # fmt: skip
    return tag("svg", line, class_="swatch", viewBox="0 0 26 12", aria_hidden="true")


def place(run: Facts, replica: int, stage: int) -> str:
    """Where something happened; a replica is named where there are several."""
    return f"stage {stage}" if run.replicas == 1 else f"r{replica} stage {stage}"
