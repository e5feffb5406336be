"""The curves of the page: empty figures, and the numbers which its script draws into them."""

from collections.abc import Sequence

from offbeat.app.report.facts import Facts, Point
from offbeat.app.report.markup import Markup, join, note, swatch, tag

_CURVES = (
    ("training_loss", 1, "Training loss", "No training loss was recorded."),
    ("test_loss", 1, "Test loss", "No evaluation was recorded, so there is no test loss."),
    ("test_accuracy", 100, "Test accuracy, %", "No accuracy was recorded while the run went on."),
)
"""Of a run: the fact, what it is multiplied by, its title, and what is said where it is missing."""


def curves(facts: Sequence[Facts]) -> Markup:
    known = {key for key, *_ in _CURVES if any(getattr(run, key) for run in facts)}
    charts = [
        tag("figure", tag("figcaption", title), class_="chart", data_chart=key)
        if key in known
        else note(missing)
        for key, _, title, missing in _CURVES
    ]
    return join([_controls(facts), tag("div", *charts, class_="charts")] if known else charts)


def _controls(facts: Sequence[Facts]) -> Markup:
    axes = [
        tag("button", word, type="button", data_axis=axis, aria_pressed=pressed)
        for axis, word, pressed in (("epoch", "epochs", "true"), ("time", "time", "false"))
    ]
    parts = [tag("span", "against ", *axes, class_="choice", role="group", aria_label="x axis")]
    if len(facts) > 1:
        legend = [
            tag("button", swatch(place), run.label,
                type="button", data_run=place, aria_pressed="true")
            for place, run in enumerate(facts)
        ]  # fmt: skip
        hint = "Runs: click to hide or show"
        parts.append(tag("span", *legend, class_="legend", role="group", aria_label=hint))
    return tag("div", *parts, class_="controls")


def columns_of(run: Facts) -> dict[str, object]:
    curves = {key: _columns(getattr(run, key), scale) for key, scale, _, _ in _CURVES}
    return {"label": run.label, **curves}


def _columns(points: Sequence[Point], scale: float) -> dict[str, list[float | None]]:
    return {
        "epoch": [_short(p.epoch) for p in points],
        "time": [_short(p.time_s) for p in points],
        "value": [_short(p.value * scale) for p in points],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
