"""Stages side by side on one GPU: a message is a reference, and an instant to wait for."""

from typing import Any

from offbeat import nest
from offbeat.stages.lanes import Addresses, current_stream
from offbeat.transport.base import Key
from offbeat.transport.memory import Memory


class LaneMemory(Memory):
    """Messages between lanes: a reference, and the instant from which it may be read."""

    def __init__(self, addresses: Addresses) -> None:
        super().__init__()
        self._addresses = addresses

    def send(self, key: Key, message: Any) -> None:
        super().send(key, (message, current_stream().record_event()))

    def receive(self, key: Key) -> Any:
        message, ready = super().receive(key)
        stream = current_stream()
        stream.wait_event(ready)
        # Memory of a slot is never given back.
        if key.what != "activation" or not self._addresses.known(key.to, key.batch):
            for tensor in nest.tensors(message):
                tensor.record_stream(stream)
        return message

    def waiting(self, stage: int) -> dict[Key, Any]:
        return {key: message for key, (message, _) in super().waiting(stage).items()}
