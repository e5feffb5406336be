"""Links over sockets, by gloo: they reach wherever the processes of a run reach each other.

Gloo's collectives are here as well: the parts of a stage's replicas, all of which must live.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from offbeat.errors import WorkerLost
from offbeat.transport.base import Gathered, Key
from offbeat.transport.link import End, Link, Pair, open_pair
from offbeat.transport.wire import Arrival, Parcel

FOREVER = timedelta(days=3650)
"""Our own watchdog decides how long a wait may be."""
HEADER_BYTES = 4096
_LENGTH = Struct("<q")
_LONGEST_HEADER_BYTES = 1 << 28
_BUCKET_BYTES = 1 << 25
"""An all-reduce of more is made of several, so that one is copied while another is sent."""


@contextmanager
def _broken_by_gloo() -> Iterator[None]:
    """Gloo says with a RuntimeError what others say with an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


class Gloo(Link):
    """A group of two: what is sent is written out of the sender's own memory."""

    name = "gloo"

    @classmethod
    def address(cls) -> Any:
        return "torch.distributed"  # which these processes have joined

    def __init__(self, end: End) -> None:
        timeout = timedelta(seconds=end.timeout_s)
        self._other = int(end.sends)
        with _broken_by_gloo():
            self._group: Any = dist.ProcessGroupGloo(end.store, 1 - self._other, 2, timeout)
        self._start = torch.empty(HEADER_BYTES, dtype=torch.uint8)

    def send(self, parcel: Parcel) -> None:
        """The first message has a fixed size and says how much more of the header follows."""
        header = parcel.header
        room = HEADER_BYTES - _LENGTH.size
        start = (_LENGTH.pack(len(header)) + header[:room]).ljust(HEADER_BYTES, b"\0")
        self._send(torch.frombuffer(bytearray(start), dtype=torch.uint8))
        if len(header) > room:
            self._send(torch.frombuffer(bytearray(header[room:]), dtype=torch.uint8))
        for tensor in parcel.tensors:
            self._send(tensor)

    def receive(self) -> Arrival:
        self._receive(self._start)
        raw = self._start.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(raw)
        if not 0 < length <= _LONGEST_HEADER_BYTES:
            raise WorkerLost(f"a message with a header of {length} bytes arrived: it is damaged.")
        header = raw[_LENGTH.size : _LENGTH.size + length]
        if length > len(header):
            rest = torch.empty(length - len(header), dtype=torch.uint8)
            self._receive(rest)
            header += rest.numpy().tobytes()
        arrival = self.arrival(header)
        for buffer in arrival.buffers:
            self._receive(buffer)
        return arrival

    def _send(self, tensor: Tensor) -> None:
        with _broken_by_gloo():
            self._group.send([tensor], self._other, 0).wait(FOREVER)

    def _receive(self, buffer: Tensor) -> None:
        with _broken_by_gloo():
            self._group.recv([buffer], self._other, 0).wait(FOREVER)


def open_gloo_pair(store: Store, timeout_s: float, whom: str, *, first: bool) -> Pair:
    """Links that need nobody but the two; one of them is ``first``. ``store``: of this pair."""
    end = End(first, store, Gloo.address(), Gloo.device, timeout_s)
    return open_pair(Gloo, end, whom)


class Collectives:
    """The parts of all replicas of a stage by one collective; it breaks when one of them dies."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        deliver: Callable[[Key, Gathered], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._group, self._device = group, device
        self._deliver, self._failed = deliver, failed
        self._lock = threading.Lock()
        self.threads: Sequence[threading.Thread] = ()

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool) -> None:
        sent_s = time.perf_counter()
        replicas = self._group.size()
        rows = [part.detach().cpu().contiguous() for part in parts]
        results, works = self._sum(rows) if summed else self._collect(rows)
        left = len(works)

        def one_done(future: Any) -> None:
            nonlocal left
            try:
                future.value()
            except RuntimeError as error:
                self._failed(error)
                return
            with self._lock:
                left -= 1
                if left:
                    return
            there = [result.to(self._device) for result in results]
            every = [there] if summed else [list(one) for one in zip(*there, strict=True)]
            self._deliver(key, Gathered(every, sent_s, time.perf_counter(), replicas))

        # The callbacks hold the rows until everything is sent.
        one_done.rows = rows  # type: ignore[attr-defined]
        for work in works:
            work.get_future().add_done_callback(one_done)

    def _sum(self, rows: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        results = [row.clone() for row in rows]  # in place, so never in the sender's own memory
        buckets = [
            bucket for row in results for bucket in row.split(max(1, _BUCKET_BYTES // row.itemsize))
        ]
        return results, [dist.all_reduce(b, group=self._group, async_op=True) for b in buckets]

    def _collect(self, rows: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        results = [row.new_empty(self._group.size(), *row.shape) for row in rows]
        return results, [
            _all_gather(_bytes_of(result), _bytes_of(row), group=self._group, async_op=True)
            for result, row in zip(results, rows, strict=True)
        ]

    def close(self) -> None:
        """Nothing is open: what was gathered has arrived, or nobody will ask for it."""


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# Renamed in torch 2.13; the old name warns there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
