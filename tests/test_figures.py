"""Figures: functions of timelines and points; phases one after the other."""

import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from drawing import draw_curves, draw_timelines

from offbeat.app.report import draw_study, in_turn
from offbeat.app.study import Cell
from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.methods import ADL, DSP, Method, PipeDream, StaleWeights, Synchronous
from offbeat.schedules.timeline import Timeline, timeline

METHODS: dict[str, Method] = {
    "BP": Synchronous(),
    "StaleWeights": StaleWeights(),
    "DSP": DSP(),
    "ADL": ADL(accumulate=4),
}


@pytest.fixture
def timelines() -> dict[str, Timeline]:
    return {name: timeline(method, 4, steps=5) for name, method in METHODS.items()}


def is_png(figure: Any) -> bool:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue().startswith(b"\x89PNG") and len(buffer.getvalue()) > 5_000


def boxes(axes: Any) -> int:
    return sum(len(collection.get_paths()) for collection in axes.collections)


def test_timelines_have_one_panel_per_method_with_its_rates(
    timelines: dict[str, Timeline],
) -> None:
    figure = draw_timelines(timelines)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "BP: busy 25%, speed-up 1.00"
    assert titles[1] == "StaleWeights: busy 100%, speed-up 4.00"
    assert len(titles) == len(METHODS)
    assert is_png(figure)


def test_every_forward_and_backward_is_one_box(timelines: dict[str, Timeline]) -> None:
    """5 steps, 4 stages, 2 kinds; ADL four times as many micro-batches."""
    figure = draw_timelines(timelines)
    assert [boxes(axes) for axes in figure.axes] == [40, 40, 40, 160]


def test_panels_share_one_time_axis_with_a_row_per_stage(timelines: dict[str, Timeline]) -> None:
    figure = draw_timelines(timelines)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, timelines["BP"].duration)}
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            f"stage {k}" for k in range(4)
        ]


def test_until_ends_the_axis_and_no_number_stands_outside(timelines: dict[str, Timeline]) -> None:
    figure = draw_timelines(timelines, until=7.5)
    for axes in figure.axes:
        assert axes.get_xlim() == (0, 7.5)
        assert all(text.get_position()[0] < 7.5 for text in axes.texts)


def test_numbers_stand_only_in_boxes_that_hold_them(timelines: dict[str, Timeline]) -> None:
    """Measured on the rendered text: no number is wider than its box."""
    figure = draw_timelines(timelines, until=36)
    assert is_png(figure)  # lays the text out
    for axes, line in zip(figure.axes, timelines.values(), strict=True):
        to_pixels = axes.transData.transform
        spans = {((s.start + s.end) / 2, s.action.stage): s for s in line.spans if s.end > s.start}
        for text in axes.texts:
            x, y = text.get_position()
            span = spans[x, round(y)]
            left, right = to_pixels((span.start, 0))[0], to_pixels((span.end, 0))[0]
            assert text.get_text() == str(span.action.batch)
            assert text.get_window_extent().width < right - left
    assert len(figure.axes[0].texts) == 24  # BP: 3 batches, F and B of 4 stages


def test_curves_are_the_given_points_with_a_legend_beside_them() -> None:
    runs = {"BP": [(1, 0.5), (2, 0.9)], "StaleWeights": [(1, 0.4), (2, 0.8)]}
    figure = draw_curves(runs, ylabel="accuracy", title="two runs")
    (axes,) = figure.axes
    assert len(axes.lines) == 2
    points = np.asarray(axes.lines[1].get_xydata()).tolist()
    assert [tuple(point) for point in points] == runs["StaleWeights"]
    assert len({line.get_color() for line in axes.lines}) == 2
    assert axes.get_ylabel() == "accuracy"
    assert is_png(figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1


def test_more_runs_than_colours_can_be_drawn() -> None:
    figure = draw_curves({f"run {k}": [(1, k)] for k in range(12)})
    assert len(figure.axes[0].lines) == 12


CELLS = [
    Cell("synchronous", 1, (0,), (0.9, 0.92), ()),
    Cell("dsp", 2, (1, 0), (0.88, 0.9), (-0.02, -0.02)),
    Cell("dsp", 4, (3, 2, 1, 0), (0.8, 0.84), (-0.1, -0.08)),
]


def test_a_study_is_a_line_per_method_over_lag_with_every_seed_as_a_dot() -> None:
    figure = draw_study(CELLS, percent=True)
    plain, means, *seeds = figure.axes[0].lines
    assert plain.get_ydata() == pytest.approx([91, 91])
    assert means.get_xydata() == pytest.approx(np.array([[1, 89], [3, 82]]))
    ends = [np.asarray(dots.get_ydata()) for dots in seeds]
    assert ends == [pytest.approx([88, 90]), pytest.approx([80, 84])]
    assert is_png(figure)


def test_missing_matplotlib_is_answered_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install matplotlib"):
        draw_study(CELLS, percent=True)


def test_drawing_never_imports_pyplot_and_importing_never_matplotlib() -> None:
    program = """
import io, sys
from offbeat.app.report import draw_study
from offbeat.app.study import Cell
assert "matplotlib" not in sys.modules
cells = [Cell("synchronous", 1, (0,), (0.9,), ())]
draw_study(cells, percent=True).savefig(io.BytesIO(), format="png")
assert "matplotlib.figure" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------------------- phases


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_phases_have_the_papers_hybrid_speed_up(share: float) -> None:
    fast, plain = timeline(StaleWeights(), 4), timeline(Synchronous(), 4)
    hybrid = in_turn([(fast, round(1000 * share)), (plain, round(1000 * (1 - share)))])
    assert hybrid.speed_up == pytest.approx(1 / (share / fast.speed_up + 1 - share))
    assert hybrid.busy_share == pytest.approx(hybrid.speed_up / 4)


def test_phases_follow_each_other_and_count_batches_on() -> None:
    fast, plain = timeline(PipeDream(), 3, steps=4), timeline(Synchronous(), 3, steps=2)
    joined = in_turn([(fast, 4), (plain, 2)])
    assert joined.duration == fast.duration + plain.duration
    later = [span for span in joined.spans if span.start >= fast.duration and span.end > span.start]
    assert {span.action.batch for span in later} == {4, 5}
    assert joined.spans[: len(fast.spans)] == fast.spans


def test_phases_count_micro_batches_and_updates_each_by_their_own() -> None:
    first, then = timeline(ADL(accumulate=4), 2, steps=3), timeline(Synchronous(), 2, steps=1)
    last = in_turn([(first, 3), (then, 1)]).spans[-len(then.spans) :]
    assert {str(span.action) for span in last} == {"0F12", "1F12", "1B12", "1U3", "0B12", "0U3"}


def test_phases_with_different_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="same number of stages"):
        in_turn([(timeline(Synchronous(), 2), 1), (timeline(Synchronous(), 3), 1)])
