"""All stages in one process, each in a lane of its own on one GPU."""

from typing import Any

from offbeat import nest
from offbeat.stages.lanes import current_stream
from offbeat.transport.base import Key
from offbeat.transport.memory import Memory


class LaneMemory(Memory):
    """Messages between lanes: a reference, and the instant from which it may be read."""

    def send(self, key: Key, message: Any) -> None:
        super().send(key, (message, current_stream().record_event()))

    def receive(self, key: Key) -> Any:
        message, ready = super().receive(key)
        stream = current_stream()
        stream.wait_event(ready)
        for tensor in nest.tensors(message):
            if not hasattr(tensor, "awaits"):  # memory of a slot is never given back
                tensor.record_stream(stream)
        return message

    def waiting(self, stage: int) -> dict[Key, Any]:
        return {key: message for key, (message, _) in super().waiting(stage).items()}
