"""Links over sockets, by gloo: they reach wherever the processes of a run reach each other."""

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
        self._group.send([tensor], self._other, 0).wait(FOREVER)

    def _receive(self, buffer: Tensor) -> None:
        self._group.recv([buffer], self._other, 0).wait(FOREVER)
