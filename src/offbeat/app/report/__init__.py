"""Pictures, tables and a page as functions of stored runs; training never calls any of them."""

from offbeat.app.report.figures import draw_curves, draw_timelines
from offbeat.app.report.files import write_report
from offbeat.app.report.page import page
from offbeat.app.report.phases import in_turn
from offbeat.app.report.plots import figures_of
from offbeat.app.report.studies import draw_study

__all__ = [
    "draw_curves",
    "draw_study",
    "draw_timelines",
    "figures_of",
    "in_turn",
    "page",
    "write_report",
]
