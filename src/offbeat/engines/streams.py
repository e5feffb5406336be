"""The streams engine: all stages in one process, each in a lane of its own on one GPU."""

import os
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from offbeat.engines.base import Engine, refuse_stuck
from offbeat.engines.placement import Placement
from offbeat.records.ledger import Ledger
from offbeat.stages.lanes import Addresses, Instant, Lane, Lanes, mark
from offbeat.transport import within

_QUEUES = 8
"""How many streams a GPU keeps apart unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise."""
_UNSETTLED = 8192
"""Entries of which the times are still on the GPU, before the oldest are asked for."""
_AT_ONCE = 256
"""How many are asked for together: reading more takes longer than the GPU's queue lasts."""


class Streams(Engine):
    """The lanes of a trainer: what runs in them, and the order between them and the caller."""

    clock = staticmethod(mark)

    def __init__(self, stages: int, device: torch.device) -> None:
        queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", _QUEUES))
        if stages > queues:
            warnings.warn(
                f"{stages} stages share {queues} hardware queues of the GPU and wait for each"
                " other there: set CUDA_DEVICE_MAX_CONNECTIONS=32 before the first use of CUDA.",
                stacklevel=3,
            )
        super().__init__(Placement.across(stages, 1, 1, 0))
        self.lanes: list[Lanes] = []
        addresses = Addresses()
        for _ in range(stages):
            lane = Lane(device)
            # Forward and backward go side by side where that leaves every lane its own queue.
            back = Lane(device) if 2 * stages <= queues else lane
            self.lanes.append(Lanes(lane, back, addresses))
        self.transports = within(1, addresses)
        self._late = LateLedger(self.ledger, self.lanes[-1].forward)
        self.record = self._late.record
        self._ahead: deque[Instant] = deque()

    @property
    def own_ledger(self) -> Ledger:
        self._late.settle()
        return self.ledger

    def run(self) -> None:
        """Queues what the workers have to do, never more than a few steps ahead of the GPU.

        First stage first, each as far as it gets: few questions are asked, and the stages that
        others wait for get the longest head start.
        """
        with self.lanes[0].forward.from_caller():
            moved = True
            while moved:
                moved = False
                for worker in self.workers:
                    while worker.ready():
                        with worker.stage.runner.entered(worker.pending[0].kind):
                            worker.advance()
                        moved = True
            refuse_stuck(self.workers)
        self._ahead.append(self.lanes[-1].forward.now())
        # Stage k runs k steps behind the first, so the queue must hold more steps than stages.
        if len(self._ahead) > 2 * len(self.lanes) + 2:
            self._ahead.popleft().event.synchronize()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Lets the caller's own stream see all work queued so far, and lanes what it does."""
        lanes = [lane for of_stage in self.lanes for lane in (of_stage.forward, of_stage.backward)]
        for lane in lanes:
            lane.caller_waits()
        try:
            yield
        finally:
            for lane in lanes:
                lane.wait_for_caller()


class LateLedger:
    """Entries whose times and losses are still on the GPU; they reach the ledger together."""

    def __init__(self, ledger: Ledger, lane: Lane) -> None:
        self._ledger = ledger
        self._rows: deque[tuple[tuple[Any, ...], Instant]] = deque()
        """What the ledger will get but for its times, and when all of it is on the host."""
        self._host: Tensor | None = None
        self._sent = 0
        self._zero = lane.now()
        self._zero_s = perf_counter()

    def record(self, *facts: Any) -> None:
        *others, end, loss, replica = facts
        landed = end
        if loss is not None and loss.is_cuda:
            loss = self._sent_to_host(loss)
            landed = mark()
        self._rows.append(((*others, end, loss, replica), landed))
        if len(self._rows) >= _UNSETTLED:
            self.settle(_AT_ONCE)

    def _sent_to_host(self, loss: Tensor) -> Tensor:
        """Sent off now: asked for later, it would come after all that its lane holds by then."""
        if self._host is None or self._host.dtype != loss.dtype:
            self.settle()
            # At once for all: to get such memory makes the GPU wait.
            self._host = torch.empty(_UNSETTLED, dtype=loss.dtype, pin_memory=True)
        place = self._host[self._sent % _UNSETTLED]
        self._sent += 1
        return place.copy_(loss.detach(), non_blocking=True)

    def settle(self, count: int | None = None) -> None:
        """Moves the oldest entries, by default all, to the ledger, waiting for them if need be."""
        rows = [self._rows.popleft() for _ in range(len(self._rows) if count is None else count)]
        if not rows:
            return
        # Those of one kind and stage come one after the other: the last of each stands for all.
        for landed in {(entry[0], entry[1]): landed for entry, landed in rows}.values():
            landed.event.synchronize()
        for (kind, stage, batch, version, start, end, loss, replica), _ in rows:
            start_s = self._zero_s + start.seconds_after(self._zero)
            end_s = self._zero_s + end.seconds_after(self._zero)
            self._ledger.record(kind, stage, batch, version, start_s, end_s, loss, replica)
        # Times are 32-bit floats on the device: a new zero keeps them exact in long runs.
        self._zero_s = end_s
        self._zero = end
