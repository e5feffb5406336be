"""All workers in one process: a message is a reference in a dictionary."""

from typing import Any

from offbeat.errors import ScheduleError
from offbeat.transport import Key


class Memory:
    """Holds messages until their receiver takes them."""

    def __init__(self) -> None:
        self._messages: dict[Key, Any] = {}

    def send(self, key: Key, message: Any) -> None:
        if key in self._messages:
            raise ScheduleError(f"{key} was sent twice.")
        self._messages[key] = message

    def arrived(self, key: Key) -> bool:
        return key in self._messages

    def receive(self, key: Key) -> Any:
        return self._messages.pop(key)

    def clear(self) -> None:
        self._messages.clear()
