"""Beats that say a process lives, and the end of a wait for one that has fallen silent.

A process that dies is noticed by its connections, which break. One that is frozen (SIGSTOP, a
suspended machine) or cut off leaves them as they are. So every process sends a beat along each
connection a few times within ``silence``, whatever its workers do, and counts its own beats since
it has heard anything. A process that was frozen itself has not counted: it blames nobody for that.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from offbeat.errors import WorkerLost

BEATS = 8
"""In the time after which silence means that a process is lost."""
_LONGEST_S = 1.0
_NEAR = 0.8
"""Of that time: who has been silent for so long goes with those who were silent for all of it."""


class Watched(Protocol):
    """Somebody who must be heard now and then."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int | None: ...

    unheard: float
    """Beats of ours since anything was heard."""

    def beat(self) -> None:
        """Says that this process lives, and counts."""

    def fall_silent(self, error: WorkerLost) -> None:
        """Nothing will be heard from there any more."""


class Pulse(threading.Thread):
    """A thread of every process that has connections."""

    def __init__(
        self,
        silence_s: float,
        circles: Callable[[], Sequence[Sequence[Watched]]],
        where: Callable[[], str],
    ) -> None:
        """``circles``: those who are judged together. ``where``: this process, in words."""
        super().__init__(daemon=True, name="offbeat-pulse")
        self._beat_s = min(_LONGEST_S, silence_s / BEATS)
        self._silence_s, self._circles, self._where = silence_s, circles, where
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._beat_s):
            for circle in self._circles():
                for one in circle:
                    one.beat()
                self.judge(circle)

    def stop(self) -> None:
        self._over.set()

    def judge(self, circle: Sequence[Watched]) -> None:
        """Gives up those who have been silent for too long.

        Where a network falls into two, each part would give the other up. Whoever misses more than
        it hears waits half as long again: the larger part speaks first.
        """
        silent_s = {one.name: one.unheard * self._beat_s for one in circle}
        missed = [one for one in circle if silent_s[one.name] >= self._silence_s / 2]
        more = len(missed) > len(circle) - len(missed) + 1
        limit_s = self._silence_s * (1.5 if more else 1.0)
        if all(silent_s[one.name] < limit_s for one in missed):
            return
        for one in missed:
            if silent_s[one.name] >= _NEAR * self._silence_s:
                one.fall_silent(self._error(one, silent_s[one.name]))

    def _error(self, one: Watched, silent_s: float) -> WorkerLost:
        return WorkerLost(
            f"{self._where()} has heard nothing from {one.name} for {silent_s:.1f} s"
            f" (silence={self._silence_s:g}), not even that it lives: that process is frozen"
            " (SIGSTOP, a debugger, a suspended machine), or the network between cuts it off. If"
            " such pauses are usual here, give Machines(silence=...) more seconds.",
            rank=one.rank,
        )
