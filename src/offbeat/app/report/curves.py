"""The curves of the page: empty figures, and the numbers which its script draws into them."""

from collections.abc import Sequence

from offbeat.app.report.facts import Facts, Point
from offbeat.app.report.markup import Markup, join, tag
from offbeat.app.report.parts import note, swatch

_CURVES = (
    ("training_loss", "Training loss", "No training loss was recorded."),
    ("test_loss", "Test loss", "No evaluation was recorded, so there is no test loss."),
    ("test_accuracy", "Test accuracy, %", "No accuracy was recorded while the run went on."),
)


def curves(facts: Sequence[Facts]) -> Markup:
    drawn = [
        _chart(key, title) if any(getattr(run, key) for run in facts) else note(missing)
        for key, title, missing in _CURVES
    ]
    if not any(getattr(run, key) for run in facts for key, _, _ in _CURVES):
        return join(drawn)
    return join([_controls(facts), tag("div", *drawn, class_="charts")])


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


def _chart(key: str, title: str) -> Markup:
    return tag("figure", tag("figcaption", title), class_="chart", data_chart=key)


def columns_of(run: Facts) -> dict[str, object]:
    return {
        "label": run.label,
        "training_loss": _columns(run.training_loss, 1),
        "test_loss": _columns(run.test_loss, 1),
        "test_accuracy": _columns(run.test_accuracy, 100),
    }


def _columns(points: Sequence[Point], scale: float) -> dict[str, list[float | None]]:
    return {
        "epoch": [_short(p.epoch) for p in points],
        "time": [_short(p.time_s) for p in points],
        "value": [_short(p.value * scale) for p in points],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
