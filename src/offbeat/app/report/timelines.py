"""The timelines of the page: measured and planned, one under the other."""

from collections.abc import Sequence

from offbeat.app.report.actions import Drawing, measured, plan, planned
from offbeat.app.report.facts import Facts
from offbeat.app.report.markup import Markup, join, tag
from offbeat.app.report.parts import note, per_run
from offbeat.errors import ConfigurationError


def timelines(facts: Sequence[Facts], drawings: list[Drawing]) -> Markup:
    """Adds to ``drawings`` what the page's script draws, in the order of its figures."""
    return join(
        [
            note(
                "Click or tap an action for its details; drag to move, pinch or use the buttons"
                " to zoom. The wheel zooms once a timeline has been clicked."
            ),
            _key(),
            per_run(facts, lambda run: join([_measured(run, drawings), _planned(run, drawings)])),
        ]
    )


def _key() -> Markup:
    kinds = (("F", "forward"), ("B", "backward"), ("U", "update"), ("A", "averages"))
    return tag(
        "p",
        *(tag("span", tag("i", class_=f"box {kind}"), word) for kind, word in kinds),
        class_="key",
    )


def _measured(run: Facts, drawings: list[Drawing]) -> Markup:
    if run.ledger is None:
        return note("No ledger was kept, or it cannot be read: there is no measured timeline.")
    drawing = measured(run.ledger)
    words = f"{len(drawing.entries):,} actions"
    if drawing.left_out:
        words = f"the last {words}; {drawing.left_out:,} earlier ones are in the trace only"
    return _timeline("Measured", words, run, drawing, drawings)


def _planned(run: Facts, drawings: list[Drawing]) -> Markup:
    try:
        line = plan(run.method, run.settings, run.stages)
    except ConfigurationError as error:
        return note(f"The planned timeline is left out: {error}")
    words = (
        "in units of a forward: a batch's forward takes 1, its backward 2, a message 0. Busy"
        f" {line.busy_share:.0%}, ideal speed-up {line.speed_up:.2f}"
    )
    return _timeline("Planned", words, run, planned(line), drawings)


def _timeline(
    kind: str, words: str, run: Facts, drawing: Drawing, drawings: list[Drawing]
) -> Markup:
    drawings.append(drawing)
    buttons = [
        tag("button", sign, type="button", data_do=word, title=help_, aria_label=help_)
        for word, sign, help_ in (
            ("in", "+", "Zoom in"),
            ("out", "\N{MINUS SIGN}", "Zoom out"),
            ("left", "\N{LEFTWARDS ARROW}", "Earlier"),
            ("right", "\N{RIGHTWARDS ARROW}", "Later"),
            ("all", "all", "Show everything"),
        )
    ]
    keys = "Left and right go from action to action, up and down to other lines, + and - zoom."
    hint = f"{kind} timeline of {run.label}. {keys}"
    canvas = tag("canvas", tabindex="0", role="application", aria_label=hint)
    return tag(
        "figure",
        tag("figcaption", kind, tag("span", f" {words}", class_="note")),
        tag("div", *buttons, tag("span", class_="range"), class_="controls"),
        canvas,
        tag("div", "No action chosen yet.", class_="details", role="status"),
        class_="timeline",
        data_timeline=len(drawings) - 1,
    )
