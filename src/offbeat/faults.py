"""Trouble by plan: slow, delayed, failing or dying workers, the same trouble every time.

>>> faults = Faults().slow(stage=1, by=1.0, probability=1 / 3, seed=0).delay("0F3", 0.5)
>>> [faults.slowdown(1, step) for step in range(6)]
[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
>>> faults.slowdown(0, 0)
0.0

A plan is a value: every process can be given the same one, and each carries out its own part.
"""

import os
import random
import signal
import time
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.schedules.table import Action, parse_actions

_Kind = Literal["delay", "fail", "kill"]


class _Slow(NamedTuple):
    stage: int | None
    by: float
    probability: float
    seed: int


class _Event(NamedTuple):
    action: Action
    kind: _Kind
    amount: float = 0.0


@dataclass(frozen=True)
class Faults:
    """A script of faults; every method returns a longer one."""

    _slows: tuple[_Slow, ...] = ()
    _events: tuple[_Event, ...] = ()

    def slow(
        self, *, stage: int | None = None, by: float, probability: float = 1.0, seed: int = 0
    ) -> "Faults":
        """Makes forward and backward take ``1 + by`` times as long, per (stage, step) at random.

        ``stage=None`` is every stage, each with draws of its own.
        """
        if by < 0 or not 0 <= probability <= 1:
            raise ConfigurationError(
                f"slow(by={by}, probability={probability}): by is at least 0 (1.0 doubles the time)"
                " and probability lies in [0, 1]."
            )
        return replace(self, _slows=(*self._slows, _Slow(stage, by, probability, seed)))

    def delay(self, action: str, seconds: float) -> "Faults":
        """Sleeps before one action, named as in a schedule: ``delay("1F3", 0.5)``."""
        return self._at(action, "delay", seconds)

    def fail(self, action: str) -> "Faults":
        """Raises an error before one action."""
        return self._at(action, "fail")

    def kill(self, action: str, signal_number: int = signal.SIGKILL) -> "Faults":
        """Ends the process by a signal before one action."""
        return self._at(action, "kill", signal_number)

    def _at(self, action: str, kind: _Kind, amount: float = 0.0) -> "Faults":
        (parsed,) = parse_actions(action)
        return replace(self, _events=(*self._events, _Event(parsed, kind, amount)))

    def slowdown(self, stage: int, step: int) -> float:
        """Extra time of a stage in a step, as a multiple of its own."""
        extra = 0.0
        for rule in self._slows:
            if rule.stage in (None, stage):
                draw = random.Random(f"{rule.seed}/{stage}/{step}").random()
                extra += rule.by if draw < rule.probability else 0.0
        return extra

    def before(self, action: Action) -> None:
        """Called by a worker ahead of each action."""
        for event in self._events:
            if event.action != action:
                continue
            if event.kind == "delay":
                time.sleep(event.amount)
            elif event.kind == "kill":
                os.kill(os.getpid(), int(event.amount))
            else:
                raise RuntimeError(f"a fault was planned at {event.action}")

    def after(self, stage: int, step: int, elapsed_s: float) -> None:
        """Called by a worker after each forward and backward with the time it took."""
        time.sleep(self.slowdown(stage, step) * elapsed_s)
