"""Neighbouring processes joined by one communicator per direction, each served by a thread.

Sending puts a parcel into a queue; a thread per edge writes it out. Another thread per edge always
has its next receive posted, so messages arrive while the worker computes. Between processes of one
host large tensors lie in shared memory and only headers are written. A message for a stage further
away is passed on by the threads in between.
"""

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError, WorkerLost
from offbeat.transport.base import Gathered, Key
from offbeat.transport.shared import Arena, Window
from offbeat.transport.wire import HEADER_BYTES, Arrival, Parcel, pack

if TYPE_CHECKING:
    from offbeat.elastic.survivors import Survivors

FOREVER = timedelta(days=3650)
"""Our own watchdog decides how long a wait may be."""
_LENGTH = struct.Struct("<q")
_GOODBYE = -1
_LONGEST_HEADER_BYTES = 1 << 28
_BUCKET_BYTES = 1 << 25
"""An all-reduce of more is made of several, so that one is copied while another is sent."""


class Outgoing(threading.Thread):
    """Writes parcels to one neighbour, in order, over a group of two."""

    def __init__(self, peer: int, group: dist.ProcessGroup, failed: Callable[..., None]) -> None:
        super().__init__(daemon=True, name=f"offbeat-to-{peer}")
        self.parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._peer, self._group, self._failed = peer, group, failed

    def run(self) -> None:
        try:
            while (parcel := self.parcels.get()) is not None:
                self._write_header(parcel.header)
                for tensor in parcel.tensors:
                    self._send(tensor)
            self._write(_LENGTH.pack(_GOODBYE))
        except RuntimeError as error:
            self._failed(self._peer, error)

    def _write_header(self, header: bytes) -> None:
        """The first message has a fixed size and says how much more of the header follows."""
        room = HEADER_BYTES - _LENGTH.size
        self._write(_LENGTH.pack(len(header)) + header[:room])
        if len(header) > room:
            self._send(torch.frombuffer(bytearray(header[room:]), dtype=torch.uint8))

    def _write(self, start: bytes) -> None:
        padded = bytearray(start.ljust(HEADER_BYTES, b"\0"))
        self._send(torch.frombuffer(padded, dtype=torch.uint8))

    def _send(self, tensor: Tensor) -> None:
        self._group.send([tensor], 1 - self._group.rank(), 0).wait(FOREVER)


class Incoming(threading.Thread):
    """Reads parcels from one neighbour and hands each over as soon as it is whole."""

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        window: Window | None,
        deliver: Callable[[Arrival], None],
        failed: Callable[..., None],
    ) -> None:
        super().__init__(daemon=True, name=f"offbeat-from-{peer}")
        self._peer, self._group, self._window = peer, group, window
        self._deliver, self._failed = deliver, failed
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)

    def run(self) -> None:
        try:
            while (header := self._read_header()) is not None:
                arrival = Arrival(header, self._window)
                for buffer in arrival.buffers:
                    self._read(buffer)
                self._deliver(arrival)
        except (RuntimeError, OSError) as error:
            self._failed(self._peer, error)

    def _read_header(self) -> bytes | None:
        self._read(self._header)
        raw = self._header.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(raw)
        if length == _GOODBYE:
            return None
        if not 0 < length <= _LONGEST_HEADER_BYTES:
            raise WorkerLost(f"a message with a header of {length} bytes arrived: it is damaged.")
        header = raw[_LENGTH.size : _LENGTH.size + length]
        if length > len(header):
            rest = torch.empty(length - len(header), dtype=torch.uint8)
            self._read(rest)
            header += rest.numpy().tobytes()
        return header

    def _read(self, buffer: Tensor) -> None:
        self._group.recv([buffer], 1 - self._group.rank(), 0).wait(FOREVER)


class Edges:
    """The transport of one process in a row of processes, one stage each, beside its peers."""

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        groups: dict[tuple[int, int], dist.ProcessGroup],
        peers: dist.ProcessGroup | None,
        *,
        device: torch.device,
        timeout_s: float,
        pids: dict[int, int],
        stalled: Callable[[], str],
    ) -> None:
        """``ranks``: of the row's stages. ``peers``: the same stage in all replicas."""
        self._stage = stage
        self._peers = peers
        self._device = device
        self._timeout_s = timeout_s
        self._stalled = stalled
        self._inbox: dict[Key, Any] = {}
        self._changed = threading.Condition()
        self._failure: OffbeatError | None = None
        self._waiting: tuple[Key, float] | None = None
        self._closing = False
        self.survivors: Survivors | None = None
        """Set where averages go on without replicas that die."""
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        # Neighbours on this host, by stage: what is sent to them goes through shared memory.
        self._arenas = {other: Arena() for other in pids}
        for other in (stage - 1, stage + 1):
            if 0 <= other < len(ranks):
                self._out[other] = Outgoing(ranks[other], groups[stage, other], self._edge_failed)
                self._in[other] = Incoming(
                    ranks[other],
                    groups[other, stage],
                    Window(pids[other]) if other in pids else None,
                    self._deliver,
                    self._edge_failed,
                )
        for thread in (*self._out.values(), *self._in.values()):
            thread.start()

    # ---------------------------------------------------------------- the transport

    def send(self, key: Key, message: Any) -> None:
        if key.to == self._stage:
            self.put(key, message)
        else:
            self._post(key, message)

    def arrived(self, key: Key) -> bool:
        with self._changed:
            return key in self._inbox

    def receive(self, key: Key) -> Any:
        """Waits for a message; a failed neighbour or too long a wait ends it with words."""
        started = time.monotonic()
        with self._changed:
            self._waiting = (key, started)
            while key not in self._inbox:
                if self._failure is not None:
                    raise self._failure
                left = self._timeout_s - (time.monotonic() - started)
                if left <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            else:
                self._waiting = None
                return self._inbox.pop(key)
        everyone = self._stalled()
        raise WorkerLost(
            f"no message for {self._timeout_s:g} s (timeout={self._timeout_s:g}):\n  {everyone}"
        )

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool = False) -> None:
        sent_s = time.perf_counter()
        if self.survivors is not None:
            self.survivors.gather(key, parts)
            return
        if self._peers is None:
            self.put(key, Gathered([list(parts)], sent_s, sent_s, 1))
            return
        replicas = self._peers.size()
        rows = [part.detach().cpu().contiguous() for part in parts]
        if summed:
            # In place, so never in the sender's own memory.
            results = [row.clone() for row in rows]
            buckets = [
                bucket
                for row in results
                for bucket in row.split(max(1, _BUCKET_BYTES // row.itemsize))
            ]
            works = [dist.all_reduce(b, group=self._peers, async_op=True) for b in buckets]
        else:
            results = [row.new_empty(replicas, *row.shape) for row in rows]
            works = [
                _all_gather(_bytes_of(result), _bytes_of(row), group=self._peers, async_op=True)
                for result, row in zip(results, rows, strict=True)
            ]
        left = len(works)

        def one_done(future: Any) -> None:
            nonlocal left
            try:
                future.value()
            except RuntimeError as error:
                self._edge_failed(None, error)
                return
            with self._changed:
                left -= 1
                if left:
                    return
            there = [result.to(self._device) for result in results]
            found = [there] if summed else [list(replica) for replica in zip(*there, strict=True)]
            self.put(key, Gathered(found, sent_s, time.perf_counter(), replicas))

        # The callbacks hold the rows until everything is sent.
        one_done.rows = rows  # type: ignore[attr-defined]
        for work in works:
            work.get_future().add_done_callback(one_done)

    def waiting(self, stage: int) -> dict[Key, Any]:
        with self._changed:
            return {key: message for key, message in self._inbox.items() if key.to == stage}

    def clear(self) -> None:
        with self._changed:
            self._inbox.clear()

    # ---------------------------------------------------------------- watching

    def waits_for(self) -> str:
        """What this worker waits for right now, in words."""
        waiting = self._waiting
        if waiting is None:
            return (
                f"stage {self._stage} waits for nothing (it computes, or the script is elsewhere)"
            )
        key, since = waiting
        return (
            f"stage {self._stage} waits for {key} from {_sender(key)}"
            f" since {time.monotonic() - since:.1f} s"
        )

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def failure(self) -> OffbeatError | None:
        return self._failure

    def fail(self, error: OffbeatError) -> None:
        """Ends this and every later wait with an error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _edge_failed(self, peer: int | None, error: RuntimeError | OSError) -> None:
        if self._closing:
            return
        if isinstance(error, OffbeatError):
            self.fail(error)
            return
        reason = str(error).splitlines()[0]
        whom = "another replica of this stage" if peer is None else f"rank {peer}"
        self.fail(
            WorkerLost(
                f"the connection to {whom} broke ({reason}). That process has died or its"
                " machine cannot be reached; its own output says why.",
                rank=peer,
            )
        )

    # ---------------------------------------------------------------- moving

    def put(self, key: Key, message: Any) -> None:
        with self._changed:
            self._inbox[key] = message
            self._changed.notify_all()

    def _deliver(self, arrival: Arrival) -> None:
        if arrival.key.to == self._stage:
            self.put(arrival.key, arrival.message(self._device))
        else:
            self._post(arrival.key, arrival.message(torch.device("cpu")))

    def _post(self, key: Key, message: Any) -> None:
        """Sends a message on its way: to its receiver, or to the neighbour that passes it on."""
        towards = self._stage + (1 if key.to > self._stage else -1)
        self._out[towards].parcels.put(pack(key, message, self._arenas.get(towards)))

    def close(self, wait_s: float = 0.0) -> bool:
        """Says goodbye to the neighbours once everything is sent; waits for theirs if asked to.

        Returns whether all threads have ended.
        """
        if not self._closing:
            self._closing = True
            for outgoing in self._out.values():
                outgoing.parcels.put(None)
            if self.survivors is not None:
                self.survivors.close()
        deadline = time.monotonic() + wait_s
        pairs = [] if self.survivors is None else self.survivors.threads
        threads = [*self._out.values(), *self._in.values(), *pairs]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _sender(key: Key) -> str:
    if key.what in ("gradients", "weights", "export"):
        return "the other replicas"
    if key.what in ("activation", "evaluation"):
        return f"stage {key.to - 1}"
    return f"stage {key.to + 1 if key.what == 'gradient' else key.source}"


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# Renamed in torch 2.13; the old name warns there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
