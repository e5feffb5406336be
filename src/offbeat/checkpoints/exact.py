"""Exact checkpoints: all that a worker holds between two steps, what is in flight included."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.checkpoints import tensorfile
from offbeat.checkpoints.facts import Manifest, facts_of
from offbeat.checkpoints.folder import file_of
from offbeat.engines.base import Engine
from offbeat.engines.board import LOST
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.placement import Placement
from offbeat.engines.worker import Target, Worker
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.rng import generator_states, set_generators
from offbeat.stages.snapshot import apart, on_device
from offbeat.transport.base import Gathered, Key

State = dict[str, Any]

_TYPES: dict[str, Any] = {"target": Target, "weights": Gathered, "gradients": Gathered}
"""Messages that are tuples with names."""


def own_files(placement: Placement) -> list[str]:
    """One for each stage of this process."""
    replicas = placement.replicas_here
    return [
        file_of(replica, stage) for replica in replicas for stage in placement.stages_of(replica)
    ]


def files_of(pipeline: Pipeline) -> dict[str, Any]:
    """What this process writes."""
    engine = pipeline.engine
    with pipeline.stopping_on_error():
        engine.await_messages(pipeline.position.step)
    states: list[State] = []
    refusal: CheckpointError | None = None
    try:
        with engine.between_steps():
            states += map(_worker_state, engine.workers)
    except CheckpointError as error:
        refusal = error
    # Nobody goes on before all have looked at their messages; and all refuse, or none.
    words = pipeline.meet("saving", None if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    _refuse_without(words, len(engine.placement.row))
    if (theirs := next(filter(None, words), None)) is not None:
        raise CheckpointError(theirs)
    states[0]["process"] = _process_state(pipeline)
    return dict(zip(own_files(engine.placement), states, strict=True))


def _refuse_without(words: list[Any], row: int) -> None:
    """Refuses where processes go on without a replica."""
    gone = sorted({rank // row for rank, text in enumerate(words) if text is LOST})
    if gone:
        raise CheckpointError(
            f"replica {', '.join(map(str, gone))} has died, and an exact checkpoint holds what"
            " every replica has in flight. save(..., drain=True) keeps the average of those who are"
            " left, and any number of replicas can go on from it."
        )


def _process_state(pipeline: Pipeline) -> State:
    engine = pipeline.engine
    return {
        "place": pipeline.position.state(),
        "first": pipeline.first,
        "ledger": _as_tensor(engine.own_ledger.to_bytes()),
        "older": engine.ledger.older(),
        "readings": _as_tensor(engine.readings.to_bytes()),
        "updates": _as_tensor(engine.updates.to_bytes()),
        "clock": time.time() - time.perf_counter(),
        "saved": time.time(),
        "generators": generator_states(pipeline.setup.device),
    }


def _as_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def resume(pipeline: Pipeline, path: Path, manifest: Manifest) -> None:
    engine, device = pipeline.engine, pipeline.setup.device
    states = [tensorfile.read(path / name) for name in own_files(engine.placement)]
    process = states[0]["process"]
    if not pipeline.is_built:
        pipeline.build(on_device({"first": process["first"]}, device)["first"])
    cuts = facts_of(pipeline)["cuts"]
    if cuts is not None and cuts != manifest["cuts"]:
        raise ConfigurationError(
            f"{path} was cut at {manifest['cuts']}, and the same first batch now"
            f" cuts at {cuts}: give cuts={manifest['cuts']}."
        )
    pipeline.discard()
    pipeline.position.load(on_device(process["place"], device))
    shift_s = process["clock"] - (time.time() - time.perf_counter()) + _pause_s(engine, process)
    with engine.between_steps():
        for worker, state in zip(engine.workers, states, strict=True):
            pipeline.follow(worker, *state["began_at"])
            _restore_worker(worker, state, device, shift_s)
    pipeline.models.hide()
    engine.ledger.go_on_from(process["ledger"].numpy().tobytes(), shift_s)
    if "older" in process:  # an earlier version kept all in memory
        engine.ledger.take_older(process["older"], path.parent, shift_s)
    engine.ledger.keep_in(path.parent)
    engine.readings.go_on_from(process["readings"].numpy().tobytes())
    engine.updates.go_on_from(process["updates"].numpy().tobytes())
    set_generators(process["generators"], device)


def _pause_s(engine: Engine, process: State) -> float:
    """How long nobody trained, the same in all processes: the ledger goes on without it."""
    if "saved" not in process:  # by an earlier version
        return 0.0
    moments = engine.meet("moment", [process["saved"], time.time()])
    saved, now = map(max, zip(*(each for each in moments if each is not LOST), strict=True))
    return max(0.0, float(now - saved))


def _worker_state(worker: Worker) -> State:
    stage, transport = worker.stage, worker.transport
    if worker.averager is not None:
        for key in worker.averager.pending():  # not to be taken, only to have arrived
            transport.send(key, transport.receive(key))
    messages = transport.waiting(stage.index)
    if stage.runner.reuses_memory:
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


def _restore_worker(worker: Worker, state: State, device: torch.device, shift_s: float) -> None:
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
