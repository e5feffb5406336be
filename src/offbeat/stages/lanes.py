"""Lanes: queues of work on one GPU that run side by side.

Every stage of the streams engine has a lane: a CUDA stream, random numbers of its own, and the
means to record work once and replay it. Between lanes, order is kept by instants: marks in one
lane's queue that another lane waits for. The host never waits.
"""

import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.rng import HostState

Pool = Any
"""Memory that recordings share; they must then run in the order in which they were recorded."""


class Instant(NamedTuple):
    """A mark in a lane's queue: something to wait for, and a time once it has passed."""

    event: torch.cuda.Event
    shift_s: float = 0.0

    def __sub__(self, seconds: float) -> "Instant":
        return Instant(self.event, self.shift_s - seconds)

    def seconds_after(self, earlier: "Instant") -> float:
        """Only once both have passed."""
        elapsed_s: float = earlier.event.elapsed_time(self.event) / 1e3
        return elapsed_s + self.shift_s - earlier.shift_s


class _Innermost(threading.local):
    stream: torch.cuda.Stream | None = None


_innermost = _Innermost()


@contextmanager
def entered(stream: torch.cuda.Stream) -> Iterator[None]:
    """``torch.cuda.stream``, without asking which stream to return to where that is known.

    A step would ask a hundred times, and asking costs the CPU more than launching does.
    """
    before = _innermost.stream
    _innermost.stream = stream
    try:
        if before is None:
            with torch.cuda.stream(stream):
                yield
        else:
            torch.cuda.set_stream(stream)
            yield
    finally:
        _innermost.stream = before
        if before is not None:
            torch.cuda.set_stream(before)


def current_stream() -> torch.cuda.Stream:
    """The one that is entered."""
    return _innermost.stream or torch.cuda.current_stream()


def mark(stream: torch.cuda.Stream | None = None) -> Instant:
    """Marks the end of a queue, by default of the one that is entered."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or current_stream())
    return Instant(event)


class NotRecordable(Exception):
    """Something launched inside cannot be replayed: where, and what CUDA says."""


class Recording(Protocol):
    def replay(self) -> None:
        """Queues the recorded work once more, on the same memory."""


class Lane:
    """One queue of work on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._random = torch.Generator(device)

    def entered(self) -> AbstractContextManager[None]:
        """Whatever is launched inside goes into this lane."""
        return entered(self._stream)

    def from_caller(self) -> AbstractContextManager[None]:
        """Whatever is entered inside returns to the caller's stream, which is asked for once."""
        return entered(torch.cuda.current_stream(self._device))

    def now(self) -> Instant:
        return mark(self._stream)

    def wait(self, instant: Instant) -> None:
        self._stream.wait_event(instant.event)

    def wait_for_caller(self) -> None:
        """Lets nothing queued from now on start before what the caller's stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def caller_waits(self) -> None:
        """The same the other way round."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def seed(self, seed: int) -> None:
        """Seeds the random numbers of the next replay."""
        self._random.manual_seed(seed)

    def drew(self) -> bool:
        """Whether the last replay drew random numbers, after a seed."""
        return bool(self._random.get_offset())

    def pool(self) -> Pool:
        return torch.cuda.graph_pool_handle()

    def record(
        self, function: Callable[[], Any], pool: Pool | None = None
    ) -> tuple[Recording, Any]:
        """Records what ``function`` launches, without running it; returns its result as well.

        The tensors in the result are filled by every replay. Inside the lane only.
        """
        graph = torch.cuda.CUDAGraph()
        pool = self.pool() if pool is None else pool
        drawn, host = torch.default_generator.get_state(), HostState.now()
        with self._own_random_numbers(), _nothing_collected():
            # Other threads (a loader that pins memory) may go on with what capture forbids us.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
                graph.capture_end()
            except BaseException as error:
                self._abandon(graph, pool)
                if not isinstance(error, RuntimeError) or isinstance(error, OffbeatError):
                    raise
                raise NotRecordable(f"{_place(error)}: {str(error).splitlines()[0]}") from error
        if host.moved or not torch.equal(drawn, torch.default_generator.get_state()):
            raise NotRecordable("random numbers of the CPU: a replay would not draw new ones")
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
        """Leaves a capture that failed: stream, allocator and generator must be usable again."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):  # capture_end may not have got that far
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
        self._random = torch.Generator(self._device)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """A recording reads its seed from device memory, which lanes must not share."""
        default = torch.cuda.default_generators[self._device.index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self._random)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)


class Addresses:
    """Where recorded stages await the gradients of what they have sent, until it is forwarded.

    An activation that has an address lies in memory of a slot, which is never given back.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[Tensor | None]] = {}

    def leave(self, receiver: int, batch: int, places: list[Tensor | None]) -> None:
        """One place per tensor of the activation; None for one that gets no gradient."""
        self._places[receiver, batch] = places

    def known(self, receiver: int, batch: int) -> bool:
        return (receiver, batch) in self._places

    def take(self, receiver: int, batch: int) -> list[Tensor | None] | None:
        """None for an activation in memory of its own."""
        return self._places.pop((receiver, batch), None)

    def clear(self) -> None:
        self._places.clear()


class Lanes(NamedTuple):
    """What one stage queues its work in; both may be one."""

    forward: Lane
    backward: Lane
    addresses: Addresses
    """Of all stages."""


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """CUDA forbids to destroy a recording, say an earlier trainer's, while it makes another."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code that led to an error."""
    ours = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    frame = (theirs or frames)[-1]
    return f"{frame.line!r} ({os.path.basename(frame.filename)}, line {frame.lineno})"
