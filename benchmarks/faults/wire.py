"""A network of our own between processes of one host, of which ranks can be cut off.

No right of root is needed: connections that are to be cut lead through a thread here, which passes
bytes on, or keeps them. A cut connection stays open and says nothing, as where a cable is pulled;
what was sent meanwhile arrives when it is mended. Everything is on loopback.
"""

import json
import random
import re
import selectors
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import Store

HOST = "127.0.0.1"
_MOST_BYTES = 1 << 20
_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
"""An address as gloo leaves it in the store: family, port, 127.0.0.1."""


class _End:
    """One of two sockets that belong together, and what is on its way to it."""

    def __init__(self, own: socket.socket, ranks: frozenset[int]) -> None:
        self.own, self.ranks = own, ranks
        self.other: _End
        self.waiting = bytearray()
        self.done = False
        """Nothing more comes from here."""


class Wire(threading.Thread):
    """Passes on what is sent; ``port`` takes the questions of :func:`door`."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="wire")
        self._selector = selectors.DefaultSelector()
        self._owners: dict[int, int] = {}
        self._cut: set[int] = set()
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(64))
        questions = socket.create_server((HOST, 0), backlog=1024)
        self.port: int = questions.getsockname()[1]
        self._selector.register(questions, selectors.EVENT_READ, lambda: self._ask(questions))
        self._ends: list[_End] = []
        self._over = False
        self.carried: dict[frozenset[int], int] = defaultdict(int)
        """Bytes, by the ranks between which they went; -1 is the store."""

    def cut(self, ranks: set[int]) -> None:
        """From now on these are cut off from all others, and from the store."""
        self._cut = set(ranks)
        self._wake.send(b"!")

    def stop(self) -> None:
        self._over = True
        self._wake.send(b"!")

    def run(self) -> None:
        while not self._over:
            for key, events in self._selector.select(1.0):
                if isinstance(key.data, _End):
                    self._serve(key.data, events)
                else:
                    key.data()
            self._look()
        for key in [*self._selector.get_map().values()]:
            key.fileobj.close()  # type: ignore[union-attr]
        for end in self._ends:
            end.own.close()
        self._wake.close()
        self._selector.close()

    def _ask(self, questions: socket.socket) -> None:
        asking, _ = questions.accept()
        with asking:
            asking.settimeout(5)
            with suppress(OSError, ValueError):
                question = json.loads(asking.makefile("rb").readline())
                asking.sendall(json.dumps(self._answer(question)).encode() + b"\n")

    def _answer(self, question: dict[str, Any]) -> int:
        if "owns" in question:
            self._owners[question["owns"]] = question["rank"]
            return 0
        target = question["to"]
        ranks = frozenset({question["rank"], self._owners.get(target, -1)})
        if not ranks & set(question["wired"]):
            return int(target)
        return self._open(target, question.get("beside"), ranks)

    def _open(self, target: int, beside: int | None, ranks: frozenset[int]) -> int:
        """A port that leads to the target; of two ends gloo lets the lower port wait."""
        fitting = [
            port
            for port in range(5000, 65000)
            if beside is None or _orders(beside, port) == _orders(beside, target)
        ]
        random.shuffle(fitting)
        for port in fitting:
            with suppress(OSError):  # somebody has it
                listener = socket.create_server((HOST, port))
                break
        else:
            raise OSError("no port is free")
        listener.setblocking(False)
        self._selector.register(
            listener, selectors.EVENT_READ, lambda: self._accept(listener, target, ranks)
        )
        return port

    def _accept(self, listener: socket.socket, target: int, ranks: frozenset[int]) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((HOST, target))
        except OSError:  # whoever it was has ended
            near.close()
            return
        ends = [_End(near, ranks), _End(far, ranks)]
        for end, other in zip(ends, reversed(ends), strict=True):
            end.other = other
            end.own.setblocking(False)
            end.own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.append(end)

    def _look(self) -> None:
        """What each socket is waited for now."""
        for end in [*self._ends]:
            events = 0
            if not end.ranks & self._cut:
                room = len(end.other.waiting) < _MOST_BYTES
                events |= selectors.EVENT_READ if room and not end.done else 0
                events |= selectors.EVENT_WRITE if end.waiting else 0
            known = self._selector.get_map().get(end.own.fileno())
            if known is None and events:
                self._selector.register(end.own, events, end)
            elif known is not None and not events:
                self._selector.unregister(end.own)
            elif known is not None and known.events != events:
                self._selector.modify(end.own, events, end)

    def _serve(self, end: _End, events: int) -> None:
        if end.own.fileno() < 0 or end.ranks & self._cut:
            return
        try:
            if events & selectors.EVENT_WRITE and end.waiting:
                del end.waiting[: end.own.send(end.waiting)]
            if events & selectors.EVENT_READ:
                found = end.own.recv(1 << 16)
                self.carried[end.ranks] += len(found)
                end.other.waiting += found
                end.done = not found
            if end.done and not end.other.waiting:
                end.other.own.shutdown(socket.SHUT_WR)
                if end.other.done:
                    self._close(end)
            elif end.other.done and not end.waiting:
                end.own.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._close(end)

    def _close(self, end: _End) -> None:
        for one in (end, end.other):
            with suppress(KeyError, ValueError):
                self._selector.unregister(one.own)
            one.own.close()
            if one in self._ends:
                self._ends.remove(one)


def _orders(own: int, other: int) -> tuple[bool, bool]:
    """How two ports compare, as numbers and as bytes of the network."""
    swapped = [int.from_bytes(port.to_bytes(2, "big"), "little") for port in (own, other)]
    return own < other, swapped[0] < swapped[1]


# ------------------------------------------------------------------------- in the processes


def ask(wire: int, question: dict[str, Any]) -> int:
    with socket.create_connection((HOST, wire), timeout=20) as asking:
        asking.sendall(json.dumps(question).encode() + b"\n")
        answer: int = json.loads(asking.makefile("rb").readline())
        return answer


class Wired(Store):
    """A store in which gloo leaves and finds addresses: those it finds lead over the wire."""

    def __init__(self, under: Store, wire: int, rank: int, wired: list[int]) -> None:
        super().__init__()
        self._under, self._wire, self._rank, self._wired = under, wire, rank, wired
        self._own: int | None = None
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        found = _ADDRESS.search(value) if isinstance(value, bytes) else None
        if found is not None:
            self._own = int.from_bytes(found[1], "big")
            ask(self._wire, {"owns": self._own, "rank": self._rank})
            self._found[key] = value
        self._under.set(key, value)

    def get(self, key: str) -> bytes:
        if key not in self._found:
            value = self._under.get(key)
            found = _ADDRESS.search(value)
            if found is not None:
                question = {"to": int.from_bytes(found[1], "big"), "beside": self._own}
                port = ask(self._wire, question | {"rank": self._rank, "wired": self._wired})
                value = value[: found.start(1)] + port.to_bytes(2, "big") + value[found.end(1) :]
            self._found[key] = value
        return self._found[key]

    def wait(self, *keys: Any) -> None:
        self._under.wait(*keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._under.check(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._under.add(key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._under.delete_key(key))
