"""The only interpreter of schedules: walks a stage's actions, moves messages, writes the ledger."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from offbeat.errors import Deadlock
from offbeat.ledger import Ledger
from offbeat.nest import Nest
from offbeat.schedule import Schedule
from offbeat.stage import Stage
from offbeat.table import Action
from offbeat.transport import Key, Transport


class Target(NamedTuple):
    """What a stage with a loss needs beside the activation."""

    values: Nest
    share: float
    """Factor on the loss's gradient: this micro-batch's share of its batch."""


class Worker:
    """Carries out the actions of one stage, in the order they are appended."""

    def __init__(
        self,
        stage: Stage,
        stages: int,
        transport: Transport,
        ledger: Ledger,
        clip: float | None = None,
    ) -> None:
        self.stage = stage
        self.pending: deque[Action] = deque()
        self._index = stage.index
        self._stages = stages
        self._transport = transport
        self._ledger = ledger
        self._clip = clip

    def begin(self, schedule: Schedule, first_batch: int) -> None:
        """Starts a fill: the schedule's numbers count from here."""
        self._first_batch = first_batch
        self._first_update = self.stage.version
        self._local_losses = schedule.local_losses
        self._clips_globally = schedule.synchronous

    @property
    def _is_last(self) -> bool:
        return self._index == self._stages - 1

    def needs(self, action: Action) -> list[Key]:
        """The messages an action waits for."""
        k, batch = self._index, self._first_batch + action.batch
        if action.kind == "F":
            keys = [Key("activation", k, batch)]
            return [*keys, Key("target", k, batch)] if self._has_loss else keys
        if action.kind == "B":
            return [] if self._has_loss else [Key("gradient", k, batch)]
        return self._norm_keys(action)

    @property
    def _has_loss(self) -> bool:
        return self._is_last or self._local_losses

    def _norm_keys(self, update: Action) -> list[Key]:
        if self._clip is None or not self._clips_globally:
            return []
        others = (k for k in range(self._stages) if k != self._index)
        number = self._first_update + update.batch
        return [Key("norms", self._index, number, source=other) for other in others]

    def ready(self) -> bool:
        """Whether the next action, if there is one, has all its messages."""
        return bool(self.pending) and all(map(self._transport.arrived, self.needs(self.pending[0])))

    def advance(self) -> None:
        """Carries out the next action, waiting for its messages if need be."""
        action = self.pending.popleft()
        carry_out = {"F": self._forward, "B": self._backward, "U": self._update}[action.kind]
        try:
            carry_out(action)
        except Exception as error:
            error.add_note(f"offbeat: this happened at {action} (stage, action, batch).")
            raise

    def _forward(self, action: Action) -> None:
        received = [self._transport.receive(key) for key in self.needs(action)]
        target = received[1] if self._has_loss else Target(None, 1.0)
        start = perf_counter()
        batch = self._first_batch + action.batch
        version = None if action.version is None else self._first_update + action.version
        output, loss = self.stage.forward(
            batch, received[0], target.values, share=target.share, version=version
        )
        end = perf_counter()
        if not self._is_last:
            self._transport.send(Key("activation", self._index + 1, batch), output)
        elif loss is not None:
            self._transport.send(Key("loss", 0, batch), loss)
        read = self.stage.version if version is None else version
        number = None if loss is None else float(loss)
        self._ledger.record("F", self._index, batch, read, start, end, number)

    def _backward(self, action: Action) -> None:
        batch = self._first_batch + action.batch
        start = perf_counter()
        self.stage.prepare(batch)
        worked = perf_counter() - start
        received = [self._transport.receive(key) for key in self.needs(action)]
        start = perf_counter() - worked
        gradients: list[Tensor | None] = self.stage.backward(batch, received[0] if received else [])
        end = perf_counter()
        if self._index > 0 and not self._local_losses:
            self._transport.send(Key("gradient", self._index - 1, batch), gradients)
        if self.pending and self.pending[0].kind == "U":
            self._send_norms(self.pending[0])
        self._ledger.record("B", self._index, batch, self.stage.version, start, end)

    def _send_norms(self, update: Action) -> None:
        keys = self._norm_keys(update)
        if keys:
            norms = self.stage.gradient_norms()
            for key in keys:
                self._transport.send(Key("norms", key.source, key.batch, self._index), norms)

    def _update(self, action: Action) -> None:
        received = [self._transport.receive(key) for key in self.needs(action)]
        start = perf_counter()
        if self._clip is not None:
            received.insert(self._index if received else 0, self.stage.gradient_norms())
            self.stage.clip(self._clip, received)
        self.stage.update()
        number = self._first_update + action.batch
        self._ledger.record("U", self._index, number, self.stage.version, start, perf_counter())


Choose = Callable[[Sequence[Worker]], Worker]


def updates_last(ready: Sequence[Worker]) -> Worker:
    """Forwards, then backwards, then updates: an error leaves as few weights moved as can be."""
    return min(ready, key=lambda worker: "FBU".index(worker.pending[0].kind))


def shuffled(seed: int) -> Choose:
    """Any ready worker: the order between stages must not matter, and tests check that."""
    return random.Random(seed).choice


def run_together(workers: Iterable[Worker], choose: Choose = updates_last) -> None:
    """Runs all workers in this process until none has anything left to do."""
    workers = list(workers)
    while ready := [worker for worker in workers if worker.ready()]:
        choose(ready).advance()
    stuck = [worker for worker in workers if worker.pending]
    if stuck:
        lines = [
            f"worker {worker.stage.index} waits at {worker.pending[0]} for"
            f" {', '.join(map(str, worker.needs(worker.pending[0])))}"
            for worker in stuck
        ]
        raise Deadlock("nobody can go on:\n  " + "\n  ".join(lines))
