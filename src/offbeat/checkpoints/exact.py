"""Exact checkpoints: all that a worker holds between two steps, what is in flight included."""

from typing import Any

import torch

from offbeat.engines.worker import Target, Worker
from offbeat.stages.snapshot import apart, on_device
from offbeat.transport.base import Gathered, Key

State = dict[str, Any]

_TYPES: dict[str, Any] = {"target": Target, "weights": Gathered, "gradients": Gathered}
"""Messages that are tuples with names."""


def worker_state(worker: Worker) -> State:
    stage, transport = worker.stage, worker.transport
    if worker.averager is not None:
        for key in worker.averager.pending():  # not to be taken, only to have arrived
            transport.send(key, transport.receive(key))
    messages = transport.waiting(stage.index)
    if stage.reuses_memory:
        messages = apart(messages)
    return {
        "stage": stage.snapshot(),
        "began_at": worker.began_at,
        "averager": None if worker.averager is None else worker.averager.snapshot(),
        "guard": worker.guard.snapshot(),
        "messages": [
            [tuple(key), tuple(message) if key.what in _TYPES else message]
            for key, message in messages.items()
        ],
    }


def restore_worker(worker: Worker, state: State, device: torch.device, shift_s: float) -> None:
    """``shift_s``: between the clock of the process that saved and this one's."""
    worker.stage.restore(state["stage"])
    moved = on_device({name: state[name] for name in ("averager", "messages", "guard")}, device)
    worker.guard.restore(moved["guard"])
    if worker.averager is not None:
        worker.averager.restore(moved["averager"])
    for words, content in moved["messages"]:
        key, message = Key(*words), content
        if key.what in _TYPES:
            message = _TYPES[key.what](*content)
        if isinstance(message, Gathered):
            sent_s, arrived_s = message.sent_s + shift_s, message.arrived_s + shift_s
            message = message._replace(sent_s=sent_s, arrived_s=arrived_s)
        worker.transport.send(key, message)
