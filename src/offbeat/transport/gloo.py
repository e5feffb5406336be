"""Links over sockets, by gloo: they reach wherever the processes of a run reach each other."""

from contextlib import suppress
from datetime import timedelta
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import WorkerLost
from offbeat.transport.groups import FOREVER
from offbeat.transport.link import End, Link
from offbeat.transport.wire import Arrival, Parcel

HEADER_BYTES = 4096
_PIECE_BYTES = 1 << 22
"""A large tensor goes piece by piece: on a slow network each shows that its sender lives."""
_NOBODYS_TAG = 1
_LENGTH = Struct("<q")
_LONGEST_HEADER_BYTES = 1 << 28


class Gloo(Link):
    """A group of two: what is sent is written out of the sender's own memory."""

    name = "gloo"

    @classmethod
    def address(cls) -> Any:
        return "torch.distributed"  # which these processes have joined

    def __init__(self, end: End) -> None:
        timeout = timedelta(seconds=end.timeout_s)
        self._other = int(end.sends)
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
        for piece in tensor.split(_PIECE_BYTES):
            self._group.send([piece], self._other, 0).wait(FOREVER)

    def _receive(self, buffer: Tensor) -> None:
        for piece in buffer.split(_PIECE_BYTES):
            self._group.recv([piece], self._other, 0).wait(FOREVER)
            self.received += 1

    def break_off(self) -> None:
        """A wait that takes too long closes a group, and with it ends every other wait in it."""
        nothing = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):
            work = self._group.recv([nothing], self._other, _NOBODYS_TAG)
            work.wait(timedelta(milliseconds=1))
