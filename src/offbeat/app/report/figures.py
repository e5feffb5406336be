"""The picture of a study, by matplotlib; a page draws its own charts.

Only ``matplotlib.figure`` is used, never pyplot: no window, no global state, and a figure that
nobody keeps is freed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat.app.study import Cell
from offbeat.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers; dark enough for lines on white.
_PALETTE = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_ASIDE = 0.04
"""By how much a method stands beside the next, so that those of the same lag can be told apart."""


def draw_study(cells: Sequence[Cell], percent: bool) -> "Figure":
    """Each configuration at the lag of its first stage, every seed a dot, the mean a marker."""
    figure = _empty_figure(8.5, 5.0)
    figure.set_layout_engine("constrained")  # makes room for a legend outside
    axes = figure.add_subplot()
    scale = 100.0 if percent else -1.0  # a loss is stored as a score, negative
    plain = [cell for cell in cells if cell.method == "synchronous"]
    for cell in plain:
        axes.axhline(scale * cell.mean, color="#000000", linewidth=1)
        low, high = min(cell.scores), max(cell.scores)
        axes.axhspan(scale * low, scale * high, color="#000000", alpha=0.08, linewidth=0)
    others = [cell for cell in cells if cell.method != "synchronous"]
    methods = list(dict.fromkeys(cell.method for cell in others))
    for place, method in enumerate(methods):
        mine = sorted((c for c in others if c.method == method), key=lambda c: max(c.lags))
        # Black is plain training's.
        colour, marker = _PALETTE[(place + 1) % len(_PALETTE)], _MARKERS[place % len(_MARKERS)]
        aside = _ASIDE * (place - (len(methods) - 1) / 2)
        lags = [max(cell.lags) + aside for cell in mine]
        axes.plot(lags, [scale * c.mean for c in mine], color=colour, marker=marker, label=method)
        for lag, cell in zip(lags, mine, strict=True):
            axes.plot([lag] * len(cell.scores), [scale * s for s in cell.scores], ".", color=colour,
                      alpha=0.4)  # fmt: skip
    axes.set_xlabel("lag of the first stage, in updates")
    axes.set_ylabel("test accuracy, %" if percent else "test loss, better upwards")
    if not percent:
        axes.invert_yaxis()
    axes.set_title("line and band: BP, mean and range over seeds" if plain else "")
    axes.grid(alpha=0.3)
    axes.locator_params(axis="x", integer=True)
    if others:
        figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def _empty_figure(width_in: float, height_in: float) -> "Figure":
    """A figure outside pyplot; says what to install where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "drawing needs matplotlib, which is missing: pip install matplotlib"
        ) from error
    return Figure(figsize=(width_in, height_in), dpi=150)
