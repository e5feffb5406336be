"""The curves of the page: empty figures, and the numbers which its script draws into them."""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.app.report.cases import Case
from offbeat.app.report.markup import Markup, join, note, swatch, tag

_CURVES = (
    ("training_loss", 1, "Training loss", "No training loss was recorded."),
    ("test_loss", 1, "Test loss", "No evaluation was recorded, so there is no test loss."),
    ("test_accuracy", 100, "Test accuracy, %", "No accuracy was recorded while the run went on."),
)
"""Of a run: the fact, what it is multiplied by, its title, and what is said where it is missing."""


@dataclass(frozen=True)
class Front:
    """The best score that any configuration had reached by a time: steps upwards, or down."""

    by_accuracy: bool
    steps: list[tuple[float, float, int]]
    """Time, score, and the place of the configuration that reached it."""
    caveat: str | None

    @property
    def noun(self) -> str:
        return "accuracy" if self.by_accuracy else "test loss"

    @classmethod
    def of(cls, cases: Sequence[Case]) -> "Front | None":
        """None unless two configurations have been evaluated at known times."""
        by_accuracy = any(run.test_accuracy for case in cases for run in case.runs)
        curves = [case.curve("test_accuracy" if by_accuracy else "test_loss") for case in cases]
        reached = [
            (point.time_s, point.value, case.place)
            for case, curve in zip(cases, curves, strict=True)
            for point in curve.points
            if point.time_s is not None
        ]
        if len({place for _, _, place in reached}) < 2:
            return None
        reached.sort(key=lambda of: (of[0], -of[1] if by_accuracy else of[1]))
        steps: list[tuple[float, float, int]] = []
        for time_s, value, place in reached:
            better = not steps or (value > steps[-1][1] if by_accuracy else value < steps[-1][1])
            if better:
                steps.append((time_s, value, place))
        return cls(by_accuracy, steps, _caveat(cases))

    def holders(self) -> list[tuple[float, int]]:
        """From when on which configuration is best."""
        held: list[tuple[float, int]] = []
        for time_s, _, place in self.steps:
            if not held or held[-1][1] != place:
                held.append((time_s, place))
        return held


def _caveat(cases: Sequence[Case]) -> str | None:
    runs = [run for case in cases for run in case.runs]
    if any(run.in_turn for run in runs):
        return (
            "Stages took turns in one process here: time is what the simulation took, not what"
            " stages side by side would take."
        )
    if len({run.machine for run in runs}) > 1:
        return "The runs differ in machine, processes or threads: their times are no comparison."
    return None


def curves(cases: Sequence[Case]) -> Markup:
    runs = [run for case in cases for run in case.runs]
    known = {key for key, *_ in _CURVES if any(getattr(run, key) for run in runs)}
    charts = [
        tag("figure", tag("figcaption", title), class_="chart", data_chart=key)
        if key in known
        else note(missing)
        for key, _, title, missing in _CURVES
    ]
    if not known:
        return join(charts)
    several = any(len(case.runs) > 1 for case in cases)
    hint = "A line is the mean of a configuration's runs, its band reaches from the lowest to the"
    hint += " highest of them."
    controls = _controls(cases)
    shown = tag("div", *charts, class_="charts")
    return join([controls, note(hint) if several else None, shown, _front(cases)])


def _front(cases: Sequence[Case]) -> Markup | None:
    front = Front.of(cases)
    if front is None:
        return None
    unit = "accuracy, %" if front.by_accuracy else "loss"
    title = f"Test {unit}, against time: the best that was reached by then"
    text = "Dots are evaluations; the stepped line is the front, the best so far of all."
    figure = tag("figure", tag("figcaption", title), class_="chart wide", data_chart="front")
    return join([figure, note(f"{text} {front.caveat or ''}".rstrip())])


def _controls(cases: Sequence[Case]) -> Markup:
    def choice(word: str, label: str, options: Sequence[tuple[str, str]]) -> Markup:
        buttons = [
            tag("button", name, type="button", aria_pressed=str(not k).lower(),
                **{f"data_{word}": value})
            for k, (value, name) in enumerate(options)
        ]  # fmt: skip
        return tag("span", *buttons, class_="choice", role="group", aria_label=label)

    parts: list[Markup] = [
        choice("axis", "x axis", (("epoch", "against epochs"), ("time", "against time"))),
        choice("part", "part of the run", (("all", "whole run"), ("end", "second half"))),
    ]
    if len(cases) > 1:
        legend = [
            tag("button", swatch(case.place), case.label,
                type="button", data_run=case.place, aria_pressed="true")
            for case in cases
        ]  # fmt: skip
        hint = "Runs: click to hide or show"
        parts.append(tag("span", *legend, class_="legend", role="group", aria_label=hint))
    return tag("div", *parts, class_="controls")


def columns_of(case: Case) -> dict[str, object]:
    curves = {key: _columns(case, key, scale) for key, scale, _, _ in _CURVES}
    return {"label": case.label, "runs": len(case.runs), **curves}


def front_of(cases: Sequence[Case]) -> dict[str, str] | None:
    """Of which curve the page's script draws the front; it knows which runs are hidden."""
    front = Front.of(cases)
    return None if front is None else {"key": "test_accuracy" if front.by_accuracy else "test_loss"}


def _columns(case: Case, key: str, scale: float) -> dict[str, list[float | None]]:
    curve = case.curve(key)
    columns: dict[str, list[float | None]] = {
        "epoch": [_short(p.epoch) for p in curve.points],
        "time": [_short(p.time_s) for p in curve.points],
        "value": [_short(p.value * scale) for p in curve.points],
    }
    if len(case.runs) > 1:
        columns["low"] = [_short(value * scale) for value in curve.low]
        columns["high"] = [_short(value * scale) for value in curve.high]
        columns["count"] = [float(count) for count in curve.runs]
    return columns


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
