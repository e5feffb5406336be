"""Pictures, tables and a page as functions of stored runs; training never calls any of them."""

from offbeat.report.figures import draw_curves, draw_timelines
from offbeat.report.files import write_report
from offbeat.report.page import page
from offbeat.report.phases import in_turn
from offbeat.report.plots import figures_of
from offbeat.report.studies import draw_study

__all__ = [
    "draw_curves",
    "draw_study",
    "draw_timelines",
    "figures_of",
    "in_turn",
    "page",
    "write_report",
]
