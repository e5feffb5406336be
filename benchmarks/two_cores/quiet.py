"""How quiet the machine was during a turn: the time that others took from its cores."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle and waiting for a disk, among the numbers of /proc/stat
_OWN = slice(11, 13)  # user and system time, after the name in /proc/PID/stat
_GUEST = 8  # what follows is counted under user time already


class Watch:
    """Compares what the machine did with what some processes did, from now on."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._start = time.monotonic()
        self._foreign = self._foreign_s()

    def foreign_share(self) -> float:
        """The others' share of the cores we may use since the start, stolen time included."""
        seconds = time.monotonic() - self._start
        cores = len(os.sched_getaffinity(0))
        return max(0.0, (self._foreign_s() - self._foreign) / (seconds * cores))

    def _foreign_s(self) -> float:
        return _busy_s() - sum(map(_own_s, self._processes))


def _busy_s() -> float:
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *words = line.split()
        if name in ours:
            ticks += sum(int(w) for place, w in enumerate(words[:_GUEST]) if place not in _IDLE)
    return ticks * _TICK_S


def _own_s(process: int) -> float:
    words = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, words[_OWN])) * _TICK_S
