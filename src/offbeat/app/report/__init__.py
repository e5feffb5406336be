"""Pictures, tables and a page as functions of stored runs; training never calls any of them."""

from offbeat.app.report.figures import draw_study
from offbeat.app.report.page import page, write_report
from offbeat.app.report.phases import in_turn

__all__ = ["draw_study", "in_turn", "page", "write_report"]
