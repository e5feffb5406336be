"""What a kind of transport is: links, each one direction between two processes.

Whatever is the same for all kinds is here and in the mailbox: queues, threads, failures, passing
on.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.errors import WorkerLost
from offbeat.transport.base import Key
from offbeat.transport.wire import Arrival, Parcel, pack


@dataclass(frozen=True)
class End:
    """This process's end of a link that is about to be opened; the other end opens its own."""

    sends: bool
    """Whether this end sends; the other receives."""
    store: Store
    """Where both ends, and nobody else, leave what they need to find each other."""
    theirs: Any
    """The :meth:`Link.address` of the other process."""
    device: torch.device
    """Where this process computes."""
    timeout_s: float
    """How long to wait for the other end."""


class Link(ABC):
    """One direction between two processes: parcels arrive whole, in order, each once.

    A link knows nothing of stages and messages. It may wait for as long as it likes in ``send``
    and ``receive``, which threads of their own call. When the other end cannot be reached any
    more it raises OSError, or as torch does RuntimeError; that ends the run, or the other replica.
    """

    name: ClassVar[str]
    device: torch.device = torch.device("cpu")
    """Where the bytes of tensors lie that are sent behind a header, and those that are received."""
    received: int = 0
    """Pieces of messages that have arrived, for kinds that take a large message in pieces."""

    @classmethod
    @abstractmethod
    def address(cls) -> Any:
        """What another process must know of this one, as JSON; None where it cannot be reached."""

    @classmethod
    def reaches(cls, mine: Any, theirs: Any) -> bool:
        """Whether this process can send to the other and receive from it, by their addresses.

        Both are asked, and a link is opened only if both say yes.
        """
        return bool(mine == theirs)

    @abstractmethod
    def __init__(self, end: End) -> None:
        """Opens the link, waiting for the other end, which opens its own at the same time."""

    @abstractmethod
    def send(self, parcel: Parcel) -> None:
        """Sends the header and then the bytes of every tensor."""

    @abstractmethod
    def receive(self) -> Arrival:
        """Waits for a header, and fills the buffers of the ``Arrival`` that is made from it."""

    def place(self, tensor: Tensor) -> Any:  # noqa: ARG002
        """Puts a tensor where the other end finds it; says where, as JSON.

        Called where the message is sent, so in the order of what was computed there. None: its
        bytes go behind the header.
        """
        return None

    def find(self, place: Any, count: int) -> Tensor:  # noqa: ARG002
        """So many bytes at a place that the other end has named; a ValueError if there is none."""
        raise ValueError(f"{self.name} knows no place {place!r}")

    def arrival(self, header: bytes) -> Arrival:
        """What :meth:`receive` makes of a header; fill its buffers."""
        return Arrival(header, self.find, self.device)

    def break_off(self) -> None:
        """Ends ``send`` and ``receive`` in other threads, whose other end has fallen silent."""
        self.close()

    def close(self) -> None:  # noqa: B027
        """Called when nothing will be sent or received any more; perhaps twice."""


class Pair(NamedTuple):
    """The links with another process: to it, and from it."""

    outgoing: Link
    incoming: Link


def open_pair(kind: type[Link], end: End, whom: str) -> Pair:
    """Opens both directions with another process; of the two, one says that it ``sends`` first.

    ``end.store``: of this pair alone.
    """
    ends = [
        replace(end, sends=sends, store=PrefixStore(direction, end.store))
        for direction, sends in (("forth", end.sends), ("back", not end.sends))
    ]
    try:
        links = [kind(end) for end in ends]
    except (OSError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WorkerLost(
            f"no connection with {whom} by {kind.name} within {end.timeout_s:g} s ({reason}). That"
            " process has died or its machine cannot be reached; its own output says why."
        ) from error
    return Pair(*(links if end.sends else reversed(links)))


_GOODBYE = Key("goodbye", 0, 0)
"""What is sent last. A link that ends without it has broken."""
_BEAT_KEY = Key("beat", 0, 0)
_BEAT = pack(_BEAT_KEY, None)


class Connection:
    """Both directions with another process, each served by a thread: a worker waits for neither."""

    def __init__(
        self,
        pair: Pair,
        rank: int,
        deliver: Callable[[Arrival], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``rank``: the other process. ``deliver`` gets each message as soon as it is whole."""
        self._pair, self._deliver, self._failed = pair, deliver, failed
        self.rank, self.name = rank, f"rank {rank}"
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._arrived = 0
        self._ended = self._broken = False
        self._heard_of = (0, 0)
        self.unheard = 0.0
        serving = {"to": self._send, "from": self._receive}
        self.threads = [
            threading.Thread(
                target=self._serve, args=(work,), daemon=True, name=f"offbeat-{way}-{rank}"
            )
            for way, work in serving.items()
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def put(self, key: Key, message: Any) -> None:
        link = self._pair.outgoing
        self._parcels.put(pack(key, message, link.place, link.device))

    def say_goodbye(self) -> None:
        """After all that has been put before."""
        self._parcels.put(None)

    def _serve(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._broken:
                self._failed(error)

    def _send(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            self._pair.outgoing.send(parcel)
        self._pair.outgoing.send(pack(_GOODBYE, None))

    def _receive(self) -> None:
        while (arrival := self._pair.incoming.receive()).key != _GOODBYE:
            self._arrived += 1
            if arrival.key != _BEAT_KEY:
                self._deliver(arrival)
        self._ended = True

    def beat(self) -> None:
        """Says that this process lives, unless something is being sent, and counts."""
        if self._parcels.empty():
            self._parcels.put(_BEAT)
        heard_of = self._arrived, self._pair.incoming.received
        if heard_of != self._heard_of or self._ended:
            self._heard_of, self.unheard = heard_of, 0
        else:  # the other end may be a little later in starting
            self.unheard += 1 if self._arrived else 0.5

    def fall_silent(self, error: WorkerLost) -> None:
        """Gives the other process up, then ends what still waits for it."""
        self._ended = self._broken = True
        self._failed(error)
        for link in self._pair:
            link.break_off()

    def close(self) -> None:
        for link in self._pair:
            link.close()


class Peers(Protocol):
    """How all rows put the parts of a stage together."""

    @property
    def threads(self) -> Sequence[threading.Thread]: ...

    @property
    def connections(self) -> Sequence[Connection]:
        """With those whose silence counts."""

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool) -> None:
        """Never waits; the parts of all are delivered as one :class:`Gathered`."""

    def close(self) -> None: ...
