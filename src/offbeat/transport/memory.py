"""All workers in one process: a message is a reference in a dictionary."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from offbeat.errors import ScheduleError
from offbeat.transport.base import Gathered, Key


class Meeting:
    """Where the replicas of one process leave their parts until all have."""

    def __init__(self, replicas: int) -> None:
        self.rows = [Memory(self, replica) for replica in range(replicas)]
        self._parts: dict[Key, dict[int, list[Tensor]]] = {}

    def bring(self, key: Key, replica: int, parts: list[Tensor]) -> None:
        found = self._parts.setdefault(key, {})
        found[replica] = parts
        if len(found) == len(self.rows):
            del self._parts[key]
            in_order = [found[place] for place in range(len(self.rows))]
            for row in self.rows:
                row.complete(key, in_order)

    def clear(self) -> None:
        self._parts.clear()


class Memory:
    """Holds the messages of one replica until their receiver takes them."""

    def __init__(self, meeting: Meeting | None = None, replica: int = 0) -> None:
        self._messages: dict[Key, Any] = {}
        self._meeting = Meeting(1) if meeting is None else meeting
        self._replica = replica
        self._sent_s: dict[Key, float] = {}

    def send(self, key: Key, message: Any) -> None:
        if key in self._messages:
            raise ScheduleError(f"{key} was sent twice.")
        self._messages[key] = message

    def arrived(self, key: Key) -> bool:
        return key in self._messages

    def receive(self, key: Key) -> Any:
        return self._messages.pop(key)

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool = False) -> None:  # noqa: ARG002
        # Summing saves a network something, but no memory: all parts are here already.
        self._sent_s[key] = perf_counter()
        self._meeting.bring(key, self._replica, list(parts))

    def complete(self, key: Key, parts: list[list[Tensor]]) -> None:
        self.send(key, Gathered(parts, self._sent_s.pop(key), perf_counter(), len(parts)))

    def waiting(self, stage: int) -> dict[Key, Any]:
        return {key: message for key, message in self._messages.items() if key.to == stage}

    def clear(self) -> None:
        self._messages.clear()
        self._sent_s.clear()
        self._meeting.clear()
