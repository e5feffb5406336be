"""One stage per process: messages over ``torch.distributed``, agreement, watchdog, launcher."""

from offbeat.processes.launcher import launch
from offbeat.processes.row import Processes, processes_launched

__all__ = ["Processes", "launch", "processes_launched"]
