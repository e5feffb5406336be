"""Exact checkpoints: all that a worker holds between two steps, what is in flight included."""

import time
from collections.abc import Collection, Iterable, Set
from dataclasses import replace
from functools import partial
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.checkpoints import tensorfile
from offbeat.checkpoints.facts import Manifest, facts_of, gone_of, placement_of
from offbeat.checkpoints.folder import file_of
from offbeat.engines.base import Engine
from offbeat.engines.board import LOST
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.placement import Placement
from offbeat.engines.worker import Target, Worker
from offbeat.errors import CheckpointError, ConfigurationError, WorkerLost
from offbeat.guards import Updates
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings
from offbeat.rng import generator_states, set_generators
from offbeat.stages.snapshot import apart, on_device
from offbeat.transport.base import Gathered, Key

State = dict[str, Any]

_TYPES: dict[str, Any] = {"target": Target, "weights": Gathered, "gradients": Gathered}
"""Messages that are tuples with names."""


def first_file(gone: Collection[int]) -> str:
    """The file that has the batch by which stages were made, for all processes to make them by."""
    return file_of(next(replica for replica in count() if replica not in gone), 0)


def ranks_without(gone: Collection[int], placement: Placement) -> list[int]:
    """The processes that hold the replicas that are left."""
    left = (row for replica, row in enumerate(placement.ranks) if replica not in gone)
    return sorted({*chain(*left)})


def own_files(placement: Placement) -> list[str]:
    """One for each stage of this process."""
    replicas = placement.replicas_here
    return [
        file_of(replica, stage) for replica in replicas for stage in placement.stages_of(replica)
    ]


def files_of(pipeline: Pipeline) -> tuple[dict[str, Any], list[int]]:
    """What this process writes, and the replicas that have died, of which nobody does."""
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
    if (theirs := next((text for text in words if text not in (None, LOST)), None)) is not None:
        raise CheckpointError(theirs)
    states[0]["process"] = _process_state(pipeline)
    lost = {rank for rank, text in enumerate(words) if text is LOST}
    rows = enumerate(engine.placement.ranks)
    gone = [replica for replica, row in rows if not lost.isdisjoint(row)]
    return dict(zip(own_files(engine.placement), states, strict=True)), gone


def _end_without(gone: Set[int], pipeline: Pipeline, path: Path) -> None:
    """Goes on as the run did that was saved: without these replicas."""
    names = ", ".join(map(str, sorted(gone)))
    if gone and pipeline.engine.membership is None:
        raise ConfigurationError(
            f"replica {names} had died when {path} was saved, and the others went on without it:"
            " resume with when_replica_dies='go on' and a process or more for each replica, as"
            " then, or from a checkpoint that was saved with drain=True."
        )
    if not gone.isdisjoint(pipeline.engine.placement.replicas_here):
        raise WorkerLost(
            f"replica {names} had died when {path} was saved: this process ends, and the others go"
            " on without it, as then. offbeat.launch(..., go_on=True, restart=1) starts it again,"
            " so that it joins them."
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


def files_for(placement: Placement, saved: Placement) -> list[str]:
    """What a process reads of a checkpoint; ``saved``: who held what when it was written."""
    names = [*own_files(placement), *map(partial(_first_file, saved), _holders(placement, saved))]
    if placement.stages_here[-1] not in saved.listeners:
        names += [file_of(replica, saved.stages - 1) for replica in placement.replicas_here]
    return list(dict.fromkeys(names))


def _holders(placement: Placement, saved: Placement) -> list[int]:
    """The processes that held what is here now."""
    here = [(r, k) for r in placement.replicas_here for k in placement.stages_of(r)]
    return list(dict.fromkeys(saved.ranks[replica][stage] for replica, stage in here))


def _first_file(saved: Placement, rank: int) -> str:
    """That which has the state of its process."""
    return own_files(replace(saved, rank=rank))[0]


def resume(pipeline: Pipeline, path: Path, manifest: Manifest) -> None:
    engine, device = pipeline.engine, pipeline.setup.device
    saved, gone = placement_of(manifest), gone_of(manifest)
    assert saved is not None
    _end_without(gone, pipeline, path)
    if not pipeline.is_built:
        first = tensorfile.read(path / first_file(gone))["process"]["first"]
        pipeline.build(on_device({"first": first}, device)["first"])
    pipeline.models.make_room()
    placement = engine.placement
    files = {name: tensorfile.read(path / name) for name in files_for(placement, saved)}
    processes: dict[int, State] = {}
    for rank in _holders(placement, saved):
        state = files[_first_file(saved, rank)]
        if "process" not in state:
            raise CheckpointError(
                f"{path} was not saved by the processes that its manifest names: it has been"
                " changed. Resume from another checkpoint."
            )
        processes[rank] = state["process"]
    rank, process = next(iter(processes.items()))
    cuts = facts_of(pipeline)["cuts"]
    if cuts is not None and cuts != manifest["cuts"]:
        raise ConfigurationError(
            f"{path} was cut at {manifest['cuts']}, and the same first batch now"
            f" cuts at {cuts}: give cuts={manifest['cuts']}."
        )
    pipeline.discard()
    owed = _owed(placement, saved, processes)
    pipeline.position.load(on_device({**process["place"], "owed": owed}, device))
    now, pause_s = time.time() - time.perf_counter(), _pause_s(engine, processes.values())
    shifts_s = {rank: one["clock"] - now + pause_s for rank, one in processes.items()}
    with engine.between_steps():
        for worker in engine.workers:
            replica, stage = worker.stage.replica, worker.stage.index
            state = files[file_of(replica, stage)]
            kept = [message for message in state["messages"] if message[0][0] != "loss"]
            if stage in placement.listeners:
                told = stage if stage in saved.listeners else saved.stages - 1
                kept += _losses(files[file_of(replica, told)], stage)
            pipeline.follow(worker, *state["began_at"])
            shift_s = shifts_s[saved.ranks[replica][stage]]
            _restore_worker(worker, {**state, "messages": kept}, device, shift_s)
    pipeline.models.hide()
    if len(processes) == 1 and own_files(placement) == own_files(replace(saved, rank=rank)):
        engine.ledger.go_on_from(_bytes_of(process["ledger"]), shifts_s[rank])
        engine.ledger.take_older(process.get("older"), path.parent, shifts_s[rank])
        engine.readings.go_on_from(_bytes_of(process["readings"]))
        engine.updates.go_on_from(_bytes_of(process["updates"]))
    else:
        _gather_records(engine, processes, shifts_s, path.parent)
    engine.ledger.keep_in(path.parent)
    set_generators(process["generators"], device)


def _losses(state: State, listener: int) -> list[Any]:
    """The losses that a stage was told and nobody has taken, for whichever is told now."""
    found = [(key, loss) for key, loss in state["messages"] if key[0] == "loss"]
    return [[(what, listener, *rest), loss] for (what, _, *rest), loss in found]


def _owed(placement: Placement, saved: Placement, processes: dict[int, State]) -> list[Any]:
    """Losses that nobody has been given yet, of every replica here."""
    found = []
    for replica in placement.replicas_here:
        rank = saved.ranks[replica][placement.stages_here[0]]
        number = replace(saved, rank=rank).replicas_here.index(replica)
        owed = processes[rank]["place"]["owed"]
        # An earlier version kept the mean of the replicas of a process.
        found.append([one if isinstance(one, Tensor) else one[number] for one in owed])
    # A replica that has come back is not owed what the others were before.
    latest_first = zip_longest(*map(reversed, found))
    return [[one for one in same if one is not None] for same in latest_first][::-1]


def _gather_records(
    engine: Engine, processes: dict[int, State], shifts: dict[int, float], folder: Path
) -> None:
    """What was written down of the stages here, wherever they were."""
    here = {(worker.stage.replica, worker.stage.index) for worker in engine.workers}
    ledgers = [Ledger.from_bytes(_bytes_of(one["ledger"])).only(here) for one in processes.values()]
    for ledger, one in zip(ledgers, processes.values(), strict=True):
        ledger.take_older(one.get("older"), folder, only=here)
    readings = [Readings.from_bytes(_bytes_of(one["readings"])) for one in processes.values()]
    merged = Ledger.merged(ledgers, shifts.values())
    engine.ledger.go_on_from(merged.to_bytes())
    engine.ledger.take_older(merged.older(), folder)
    engine.readings.go_on_from(Readings.merged(readings).only(here).to_bytes())
    updates = Updates()
    for one in processes.values():
        updates.add_bytes(_bytes_of(one["updates"]))
    engine.updates.go_on_from(updates.only(here).to_bytes())


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _pause_s(engine: Engine, processes: Iterable[State]) -> float:
    """How long nobody trained, the same in all processes: the ledger goes on without it."""
    saved = [process["saved"] for process in processes if "saved" in process]
    if not saved:  # by an earlier version
        return 0.0
    moments = engine.meet("moment", [max(saved), time.time()])
    last, now = map(max, zip(*(each for each in moments if each is not LOST), strict=True))
    return max(0.0, float(now - last))


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
