"""Saving a run with everything it has in flight, and taking it up again with the same bits.

An *exact* checkpoint holds what every stage, every message and every average under way is between
two steps; nothing is drained. A *drained* one holds plain weights and training state by name, and
fits any cut, method or number of replicas.
"""

import hashlib
import re
import time
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat import __version__
from offbeat.checkpoints import drained, tensorfile
from offbeat.checkpoints.folder import (
    FORMAT,
    Found,
    candidates,
    name_of,
    place_of,
    refuse_strange,
)
from offbeat.checkpoints.writing import Alone, Order, Writer
from offbeat.engines.board import LOST
from offbeat.engines.processes import describe
from offbeat.engines.worker import Target, Worker
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.methods import Method
from offbeat.methods.base import require_count
from offbeat.rng import generator_states, set_generators
from offbeat.stages.snapshot import apart, on_device
from offbeat.transport.base import Gathered, Key

if TYPE_CHECKING:
    from offbeat.trainer import Trainer

DATA, MODEL = "data.safetensors", "model.pt"
State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on: after ``step`` steps, at 0 if there was no checkpoint."""

    step: int = 0
    data: Any = None
    """What was given to ``save(data=...)``: a loader's ``state_dict()``, or plain values."""
    path: Path | None = None
    """The checkpoint that was used; None if the folder had none."""
    kind: str | None = None
    """"exact" or "drained"."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, and why."""


class Checkpoints:
    """The checkpoints of one trainer; every process calls alike."""

    def __init__(self, trainer: "Trainer", method: Method) -> None:
        self._trainer = trainer
        self._method = describe(method)
        self._folders: set[Path] = set()
        """Folders that belong to this run: it has saved there, or looked there before it began."""
        self._writer: Writer | None = None

    # ---------------------------------------------------------------- saving

    def save(self, folder: Path, *, drain: bool, keep: int, wait: bool, data: Any) -> Path:
        trainer = self._trainer
        require_count("keep", keep)
        folder = folder.absolute()
        if not trainer._workers:
            raise CheckpointError(
                "there is nothing to save yet: the first step makes the stages. Save after it."
            )
        if trainer._processes is not None and trainer._processes.joined_at:
            raise CheckpointError(
                f"a replica came back at step {trainer._processes.joined_at} of this run, and it"
                " knows nothing of the run's checkpoints. Keep the weights with state_dict()."
            )
        if folder not in self._folders:
            refuse_strange(folder)
            self._folders.add(folder)
        if drain:
            trainer._owed = trainer.flush()
        self._writing.start(self._order(folder, drain, keep, data))
        if wait:
            self.wait()
        return place_of(folder, trainer._step)

    def wait(self) -> None:
        """Until everything is on disk; raises if the last checkpoint could not be written."""
        self._writing.wait()

    @property
    def _writing(self) -> Writer:
        if self._writer is None:
            processes = self._trainer._processes
            if processes is None:
                self._writer = Writer(Alone(), 0, lambda: False, timeout_s=0.0)
            else:
                transport = processes.transport
                self._writer = Writer(
                    processes.notes(),
                    processes.rank,
                    lambda: transport.failed,
                    processes.timeout_s,
                )
        return self._writer

    def _order(self, folder: Path, drain: bool, keep: int, data: Any) -> Order:
        trainer = self._trainer
        # The last write first: two snapshots at once would double what is held in memory.
        self.wait()
        ranks = self._keepers() if drain else list(range(trainer.mesh_size))
        files = self._drained_files(ranks) if drain else self._exact_files()
        if data is not None and trainer.rank == ranks[0]:
            # A copy: it is written while the loader goes on.
            files[DATA] = deepcopy(data.state_dict() if hasattr(data, "state_dict") else data)
        return Order(
            folder=folder,
            step=trainer._step,
            keep=keep,
            files=files,
            ranks=ranks,
            manifest={
                "format": FORMAT,
                "kind": "drained" if drain else "exact",
                "step": trainer._step,
                "saved": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": {"offbeat": __version__, "torch": torch.__version__},
                "threads": torch.get_num_threads(),
                "data": data is not None,
                **self._facts(),
                "model": _signature(trainer),
            },
        )

    def _facts(self) -> State:
        """What must be the same for a run to go on exactly."""
        trainer = self._trainer
        autocast = trainer._recipe.autocast
        return {
            "method": self._method,
            "stages": trainer.stages,
            "cuts": None if trainer.cuts is None else list(trainer.cuts),
            "replicas": trainer.replicas,
            "averaging": describe(trainer.averaging),
            "corrections": [describe(correction) for correction in trainer.corrections],
            "monitor": describe(trainer._monitor),
            "guards": describe(trainer._guards),
            "compile": trainer._recipe.compile,
            "processes": trainer.mesh_size,
            "seed": trainer._recipe.seed,
            "clip": trainer._clip,
            "autocast": None if autocast is None else str(autocast),
            "layers": _layers(trainer),
        }

    def _exact_files(self) -> dict[str, Any]:
        trainer = self._trainer
        processes = trainer._processes
        if processes is not None:
            with trainer._stopping_on_error():
                processes.await_messages(trainer._step)
        files: dict[str, Any] = {}
        refusal: CheckpointError | None = None
        try:
            with trainer._joined():
                for worker in trainer._workers:
                    files[_name(worker.stage.replica, worker.stage.index)] = _worker_state(worker)
        except CheckpointError as error:
            refusal = error
        # Nobody goes on before all have looked at their messages; and all refuse, or none.
        words = trainer._meet("saving", None if refusal is None else str(refusal))
        refusal = refusal or self._refusal_without(words)
        refusal = refusal or next((CheckpointError(text) for text in words if text), None)
        if refusal is not None:
            raise refusal
        next(iter(files.values()))["process"] = self._process_state()
        return files

    def _refusal_without(self, words: list[Any]) -> CheckpointError | None:
        """Of processes that go on without a replica."""
        stages = self._trainer.stages
        gone = sorted({rank // stages for rank, text in enumerate(words) if text is LOST})
        if not gone:
            return None
        return CheckpointError(
            f"replica {', '.join(map(str, gone))} has died, and an exact checkpoint holds what"
            " every replica has in flight. save(..., drain=True) keeps the average of those who are"
            " left, and any number of replicas can go on from it."
        )

    def _process_state(self) -> State:
        trainer = self._trainer
        return {
            "place": trainer._place(),
            "first": trainer._first,
            "ledger": _as_tensor(trainer.own_ledger.to_bytes()),
            "readings": _as_tensor(trainer._readings.to_bytes()),
            "updates": _as_tensor(trainer._updates.to_bytes()),
            "clock": time.time() - time.perf_counter(),
            "generators": generator_states(trainer._device),
        }

    def _keepers(self) -> list[int]:
        """The ranks that write a drained checkpoint: those of the first replica that is there."""
        processes = self._trainer._processes
        if processes is None:
            return [0]
        with self._trainer._stopping_on_error():
            return processes.first_row()

    def _drained_files(self, ranks: Sequence[int]) -> dict[str, Any]:
        trainer = self._trainer
        state = trainer.state_dict()  # by every process
        files: dict[str, Any] = {MODEL: state} if trainer.rank == ranks[0] else {}
        replica = ranks[0] // len(ranks)
        for worker in trainer._workers:
            if worker.stage.replica == replica:
                found = drained.stage_state(worker.stage, trainer.model)
                if worker.stage.index == 0:
                    found["place"] = trainer._place()
                files[_name(0, worker.stage.index)] = found
        return files

    # ---------------------------------------------------------------- resuming

    def resume(self, folder: Path, data: Any) -> Resumed:
        trainer = self._trainer
        trainer._catching_up.refuse_if_behind()
        folder = folder.absolute()
        self.wait()
        found, skipped = self._choose(folder)
        self._folders.add(folder)
        for words in skipped:
            if trainer.rank == 0:
                warnings.warn(words, stacklevel=3)
        if found is None:
            return Resumed()
        assert found.manifest is not None
        self._compare(found)
        with trainer._stopping_on_error(), trainer._joined(), torch.enable_grad():
            if found.manifest["kind"] == "exact":
                self._resume_exactly(found)
            else:
                self._resume_drained(found)
        trainer._meet("resumed")  # who goes on early sends what others then clear away
        stored = tensorfile.read(found.path / DATA) if found.manifest["data"] else None
        if stored is not None and hasattr(data, "load_state_dict"):
            data.load_state_dict(stored)
        return Resumed(
            step=trainer._step,
            data=stored,
            path=found.path,
            kind=found.manifest["kind"],
            skipped=tuple(skipped),
        )

    def _choose(self, folder: Path) -> tuple[Found | None, list[str]]:
        """The newest checkpoint that every process can use, and why newer ones were passed over."""
        _refuse_misplaced(folder)
        found = candidates(folder)
        steps = [each.step for each in found]
        for rank, others in enumerate(self._trainer._meet("checkpoints", steps)):
            if others is not LOST and others != steps:
                raise ConfigurationError(
                    f"rank {self._trainer.rank} finds the checkpoints of steps {steps} in {folder},"
                    f" rank {rank} those of {others}: give a folder that all processes share."
                )
        skipped: list[str] = []
        for each in found:
            problems = self._trainer._meet("problem", each.problem(self._needed(each)))
            problem = next((text for text in problems if text not in (None, LOST)), None)
            if problem is None:
                return each, skipped
            skipped.append(f"{each.path} cannot be used: {problem}.")
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {folder} can be used:\n  "
                + "\n  ".join(skipped)
                + "\nGive an empty folder to start anew."
            )
        return None, skipped

    def _needed(self, found: Found) -> list[str]:
        """The files of a checkpoint that this process reads."""
        manifest = found.manifest or {}
        shared = [DATA] if manifest.get("data") else []
        if manifest.get("kind") == "drained":
            stages = range(int(manifest.get("stages", 0)))
            return [MODEL, *(_name(0, stage) for stage in stages), *shared]
        facts = self._facts()
        if any(manifest.get(name) != facts[name] for name in ("processes", "stages", "replicas")):
            return shared  # refused later, in words of its own
        return [*self._own_files(), *shared]

    def _own_files(self) -> list[str]:
        trainer = self._trainer
        stages = range(trainer.stages) if trainer._processes is None else [trainer._processes.stage]
        return [_name(replica, stage) for replica in trainer._here for stage in stages]

    def _compare(self, found: Found) -> None:
        """Refuses a checkpoint of another model or, where bits count, of other settings."""
        manifest = found.manifest
        assert manifest is not None
        ours, theirs = _signature(self._trainer), manifest["model"]
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise ConfigurationError(
                    f"{found.path} is of another model: {name!r} is {theirs.get(name, 'missing')}"
                    f" there and {ours.get(name, 'missing')} here. Build the same model."
                )
        if manifest["kind"] == "drained":
            return
        for name, value in self._facts().items():
            stored = manifest[name]
            if name == "cuts" and value is None:
                continue  # decided by the stored first batch
            if stored != value:
                raise ConfigurationError(
                    f"{found.path} was saved with {_NAMES[name]} {stored}, and this trainer has"
                    f" {value}. An exact checkpoint holds what is in flight, so only the same"
                    " settings can go on from it: build the trainer as it was, or resume from one"
                    " saved with drain=True."
                )
        for name, now in (("torch", torch.__version__), ("threads", torch.get_num_threads())):
            then = manifest["versions"]["torch"] if name == "torch" else manifest["threads"]
            if then != now and self._trainer.rank == 0:
                warnings.warn(
                    f"{found.path} was saved with {_NAMES[name]} {then}, this is {now}: the run"
                    " goes on, but not necessarily with the same bits.",
                    stacklevel=4,
                )

    def _resume_exactly(self, found: Found) -> None:
        trainer = self._trainer
        states = [tensorfile.read(found.path / name) for name in self._own_files()]
        process = states[0]["process"]
        if not trainer._workers:
            trainer._build(on_device({"first": process["first"]}, trainer._device)["first"])
        assert found.manifest is not None
        if trainer.cuts is not None and list(trainer.cuts) != found.manifest["cuts"]:
            raise ConfigurationError(
                f"{found.path} was cut at {found.manifest['cuts']}, and the same first batch now"
                f" cuts at {list(trainer.cuts)}: give cuts={found.manifest['cuts']}."
            )
        trainer._discard()
        trainer._go_to(on_device(process["place"], trainer._device))
        shift_s = process["clock"] - (time.time() - time.perf_counter())
        with trainer._joined():
            for worker, state in zip(trainer._workers, states, strict=True):
                trainer._follow(worker, *state["began_at"])
                _restore_worker(worker, state, trainer._device, shift_s)
        trainer._ledger.go_on_from(process["ledger"].numpy().tobytes(), shift_s)
        trainer._readings.go_on_from(process["readings"].numpy().tobytes())
        trainer._updates.go_on_from(process["updates"].numpy().tobytes())
        set_generators(process["generators"], trainer._device)

    def _resume_drained(self, found: Found) -> None:
        trainer = self._trainer
        manifest = found.manifest
        assert manifest is not None
        stages = range(manifest["stages"])
        states = [tensorfile.read(found.path / _name(0, stage)) for stage in stages]
        weights = torch.load(found.path / MODEL, weights_only=True, map_location="cpu")
        trainer._discard()
        for model in trainer._models:
            model.load_state_dict(weights)
        place = dict(states[0]["place"])
        if manifest["method"] != self._method:
            place |= {"phase": 0, "steps_in_phase": 0}
        trainer._go_to(on_device(place, trainer._device))

        def take_over() -> None:
            facts = self._facts()
            same = all(manifest[name] == facts[name] for name in _OF_CORRECTIONS)
            for worker in trainer._workers:
                model = trainer._models[worker.stage.replica - trainer._here[0]]
                drained.take_over(worker.stage, model, states)
                if same:
                    worker.stage.corrector.load_state_dict(
                        on_device(states[worker.stage.index]["corrections"], trainer._device)
                    )
                if worker.averager is not None:
                    worker.averager.forget()

        if trainer._workers:
            take_over()
        else:
            trainer._when_built = take_over


_OF_CORRECTIONS = ("method", "stages", "cuts", "corrections")
"""What must be the same for corrections to go on with what they remember."""


def _as_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _refuse_misplaced(folder: Path) -> None:
    """What looks like a place of checkpoints and is none would start a run anew."""
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file: give the folder that save() was given.")
    name = name_of(folder)
    if name is not None:
        again = "" if name == folder.name else f", and call it {name} again"
        raise ConfigurationError(
            f"{folder} is a checkpoint itself: give the folder around it, {folder.parent}{again}."
        )
    inner = folder / "checkpoints"
    if candidates(inner) and not candidates(folder):
        raise ConfigurationError(f"{folder} has its checkpoints in {inner}: give that folder.")


def _name(replica: int, stage: int) -> str:
    return f"replica-{replica}-stage-{stage}.safetensors"


_NAMES = {
    "method": "method",
    "stages": "a number of stages of",
    "cuts": "cuts",
    "replicas": "a number of replicas of",
    "averaging": "averaging",
    "corrections": "corrections",
    "monitor": "monitor",
    "guards": "guards",
    "compile": "compile",
    "processes": "a number of processes of",
    "seed": "seed",
    "clip": "clip",
    "autocast": "autocast",
    "layers": "layers of digest",
    "torch": "PyTorch",
    "threads": "a number of threads of",
}


def _signature(trainer: "Trainer") -> dict[str, str]:
    """Names, types and shapes of the model's weights and buffers."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in trainer.model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _layers(trainer: "Trainer") -> str:
    """A digest of the model as it prints, which tells a dropout of 0.1 from one of 0.2."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(trainer.model))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------- one worker

_TYPES: dict[str, Any] = {"target": Target, "weights": Gathered, "gradients": Gathered}
"""Messages that are tuples with names."""


def _worker_state(worker: Worker) -> State:
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


def _restore_worker(worker: Worker, state: State, device: torch.device, shift_s: float) -> None:
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
