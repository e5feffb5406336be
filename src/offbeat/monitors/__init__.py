"""What a run can be asked about its own staleness."""

from offbeat.monitors.monitor import Monitor

__all__ = ["Monitor"]
