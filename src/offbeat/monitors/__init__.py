"""What a run can be asked about its own staleness. Joining ``WATCHES`` is what adds a monitor."""

from offbeat.monitors.monitor import Monitor as Monitor
from offbeat.monitors.staleness import Staleness
from offbeat.monitors.watch import Watch as Watch

WATCHES: tuple[type[Watch], ...] = (Staleness,)
