"""All workers in one process: a message is a reference in a dictionary."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from offbeat.errors import ScheduleError
from offbeat.transport.base import Gathered, Key, Members


class Meeting:
    """Where the replicas of one process leave their parts until all have."""

    def __init__(self, replicas: int) -> None:
        self.rows = [Memory(self, replica) for replica in range(replicas)]
        self._brought: dict[Key, dict[int, tuple[float, list[Tensor]]]] = {}

    def bring(self, key: Key, replica: int, parts: list[Tensor]) -> None:
        found = self._brought.setdefault(key, {})
        found[replica] = (perf_counter(), parts)
        if len(found) == len(self.rows):
            del self._brought[key]
            in_order = [found[place][1] for place in range(len(self.rows))]
            for place, row in enumerate(self.rows):
                sent_s, _ = found[place]
                row.send(key, Gathered(in_order, sent_s, perf_counter(), len(self.rows)))

    def clear(self) -> None:
        self._brought.clear()


class Memory:
    """Holds the messages of one replica until their receiver takes them."""

    def __init__(self, meeting: Meeting | None = None, replica: int = 0) -> None:
        self._messages: dict[Key, Any] = {}
        self._meeting = Meeting(1) if meeting is None else meeting
        self._replica = replica

    def send(self, key: Key, message: Any) -> None:
        if key in self._messages:
            raise ScheduleError(f"{key} was sent twice.")
        self._messages[key] = message

    def arrived(self, key: Key) -> bool:
        return key in self._messages

    def receive(self, key: Key) -> Any:
        return self._messages.pop(key)

    def gather(
        self,
        key: Key,
        parts: Sequence[Tensor],
        *,
        summed: bool = False,  # noqa: ARG002
        members: Members | None = None,  # noqa: ARG002
    ) -> None:
        # Both save a network something, but no memory: all parts are here already.
        self._meeting.bring(key, self._replica, list(parts))

    def waiting(self, stage: int) -> dict[Key, Any]:
        return {key: message for key, message in self._messages.items() if key.to == stage}

    def clear(self) -> None:
        self._messages.clear()
        self._meeting.clear()
