"""Pictures and tables as functions of stored runs; training never calls any of them."""

from offbeat.report.figures import draw_curves, draw_timelines
from offbeat.report.phases import in_turn

__all__ = ["draw_curves", "draw_timelines", "in_turn"]
