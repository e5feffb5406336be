"""HTML that cannot be forgotten to escape: text is escaped, only :class:`Markup` is not."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from offbeat.app.report.facts import Facts

COLOURS = 7
"""Run colours in the style sheet; with the dashes they tell 28 runs apart."""
DASHES = ("", "7 4", "8 3 2 3", "2 3")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; ``class_`` and ``aria_label`` become ``class`` and ``aria-label``.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.rstrip("_").replace("_", "-")
        words.append(written if value is True else f'{written}="{html.escape(str(value))}"')
    return Markup(f"<{' '.join(words)}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Children one after the other; None is nothing."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


def table(
    caption: str, head: Sequence[object], body: Iterable[Sequence[object]], *, class_: str = ""
) -> Markup:
    """A table in a box of its own, which scrolls where the page is narrow.

    The first cell of a line is its heading.
    """
    lines = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in rest))
        for first, *rest in body
    ]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", tag("span", caption)),
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
            tag("tbody", *lines),
            class_=class_ or None,
        ),
        class_="scroll",
        role="region",
        aria_label=caption,
        tabindex="0",
    )


def note(text: str) -> Markup:
    return tag("p", text, class_="note")


def bar(share: float, kind: str = "") -> Markup:
    width = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
    return tag("span", tag("i", style=width, class_=kind or None), class_="bar")


def fold(summary: object, *content: object, open_: bool = False) -> Markup:
    """What is there for whoever asks."""
    return tag("details", tag("summary", summary), *content, open=open_)


def scale(
    low: float,
    high: float,
    dots: Sequence[float],
    bar: tuple[float, float] | None = None,
    *,
    mean: float | None = None,
    line: float | None = None,
    class_: str = "",
) -> Markup:
    """Values on a line from ``low`` to ``high``: dots, a bar beneath, a mark for their mean."""

    def at(value: float) -> float:
        return 100 * min(1.0, max(0.0, (value - low) / (high - low)))

    marks = []
    if bar is not None:
        left, right = map(at, bar)
        marks.append(tag("i", class_="span", style=f"left:{left:.1f}%;width:{right - left:.1f}%"))
    if line is not None:
        marks.append(tag("i", class_="zero", style=f"left:{at(line):.1f}%"))
    marks += [tag("i", class_="seed", style=f"left:{at(value):.1f}%") for value in dots]
    if mean is not None:
        marks.append(tag("i", class_="mean", style=f"left:{at(mean):.1f}%"))
    return tag("span", *marks, class_=f"scale {class_}".strip(), aria_hidden="true")


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


def data_block(name: str, value: Any) -> Markup:
    """JSON inside a page: read by the script, run by nobody."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    # Inside <script> only "</" and "<!--" mean something; neither is left.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{html.escape(name)}">{safe}</script>')


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
