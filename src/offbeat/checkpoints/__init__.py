"""Saving a run with everything it has in flight, and taking it up again with the same bits.

An *exact* checkpoint holds what every stage, every message and every average under way is between
two steps; nothing is drained. A *drained* one holds plain weights and training state by name, and
fits any cut, method or number of replicas.
"""

import time
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat import __version__
from offbeat.checkpoints import drained, tensorfile
from offbeat.checkpoints.exact import restore_worker, worker_state
from offbeat.checkpoints.facts import compare_facts, compare_models, describe_model, facts_of
from offbeat.checkpoints.folder import (
    FORMAT,
    Found,
    candidates,
    name_of,
    place_of,
    refuse_strange,
)
from offbeat.checkpoints.writing import Order, Writer
from offbeat.engines.board import LOST
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.setup import describe
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.methods.base import require_count
from offbeat.rng import generator_states, set_generators
from offbeat.stages.snapshot import on_device

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

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._folders: set[Path] = set()
        """Folders that belong to this run: it has saved there, or looked there before it began."""
        self._writer: Writer | None = None

    # ---------------------------------------------------------------- saving

    def save(self, folder: Path, *, drain: bool, keep: int, wait: bool, data: Any) -> Path:
        pipeline, engine = self._pipeline, self._pipeline.engine
        require_count("keep", keep)
        folder = folder.absolute()
        if not pipeline.is_built:
            raise CheckpointError(
                "there is nothing to save yet: the first step makes the stages. Save after it."
            )
        if engine.joined_at:
            raise CheckpointError(
                f"a replica came back at step {engine.joined_at} of this run, and it"
                " knows nothing of the run's checkpoints. Keep the weights with state_dict()."
            )
        if folder not in self._folders:
            refuse_strange(folder)
            self._folders.add(folder)
        if drain:
            pipeline.drain()
        self._writing.start(self._order(folder, drain, keep, data))
        if wait:
            self.wait()
        return place_of(folder, pipeline.position.step)

    def wait(self) -> None:
        """Until everything is on disk; raises if the last checkpoint could not be written."""
        self._writing.wait()

    @property
    def _writing(self) -> Writer:
        if self._writer is None:
            engine = self._pipeline.engine
            failed = lambda: engine.has_failed  # noqa: E731
            self._writer = Writer(engine.notes(), engine.rank, failed, engine.timeout_s)
        return self._writer

    def _order(self, folder: Path, drain: bool, keep: int, data: Any) -> Order:
        pipeline, engine = self._pipeline, self._pipeline.engine
        # The last write first: two snapshots at once would double what is held in memory.
        self.wait()
        ranks = self._keepers() if drain else list(range(engine.size))
        files = self._drained_files(ranks) if drain else self._exact_files()
        if data is not None and engine.rank == ranks[0]:
            # A copy: it is written while the loader goes on.
            files[DATA] = deepcopy(data.state_dict() if hasattr(data, "state_dict") else data)
        return Order(
            folder=folder,
            step=pipeline.position.step,
            keep=keep,
            files=files,
            ranks=ranks,
            manifest={
                "format": FORMAT,
                "kind": "drained" if drain else "exact",
                "step": pipeline.position.step,
                "saved": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": {"offbeat": __version__, "torch": torch.__version__},
                "threads": torch.get_num_threads(),
                "data": data is not None,
                **facts_of(pipeline),
                "model": describe_model(pipeline.cut.model),
            },
        )

    def _exact_files(self) -> dict[str, Any]:
        pipeline, engine = self._pipeline, self._pipeline.engine
        with pipeline.stopping_on_error():
            engine.await_messages(pipeline.position.step)
        files: dict[str, Any] = {}
        refusal: CheckpointError | None = None
        try:
            with engine.between_steps():
                for worker in engine.workers:
                    files[_name(worker.stage.replica, worker.stage.index)] = worker_state(worker)
        except CheckpointError as error:
            refusal = error
        # Nobody goes on before all have looked at their messages; and all refuse, or none.
        words = pipeline.meet("saving", None if refusal is None else str(refusal))
        refusal = refusal or self._refusal_without(words)
        refusal = refusal or next((CheckpointError(text) for text in words if text), None)
        if refusal is not None:
            raise refusal
        next(iter(files.values()))["process"] = self._process_state()
        return files

    def _refusal_without(self, words: list[Any]) -> CheckpointError | None:
        """Of processes that go on without a replica."""
        stages = self._pipeline.cut.stages
        gone = sorted({rank // stages for rank, text in enumerate(words) if text is LOST})
        if not gone:
            return None
        return CheckpointError(
            f"replica {', '.join(map(str, gone))} has died, and an exact checkpoint holds what"
            " every replica has in flight. save(..., drain=True) keeps the average of those who are"
            " left, and any number of replicas can go on from it."
        )

    def _process_state(self) -> State:
        pipeline, engine = self._pipeline, self._pipeline.engine
        return {
            "place": pipeline.position.state(),
            "first": pipeline.first,
            "ledger": _as_tensor(engine.own_ledger.to_bytes()),
            "readings": _as_tensor(engine.readings.to_bytes()),
            "updates": _as_tensor(engine.updates.to_bytes()),
            "clock": time.time() - time.perf_counter(),
            "generators": generator_states(pipeline.setup.device),
        }

    def _keepers(self) -> list[int]:
        """The ranks that write a drained checkpoint: those of the first replica that is there."""
        with self._pipeline.stopping_on_error():
            return self._pipeline.engine.first_row()

    def _drained_files(self, ranks: Sequence[int]) -> dict[str, Any]:
        pipeline, engine = self._pipeline, self._pipeline.engine
        state = pipeline.weights()  # by every process
        files: dict[str, Any] = {MODEL: state} if engine.rank == ranks[0] else {}
        replica = ranks[0] // len(ranks)
        for worker in engine.workers:
            if worker.stage.replica == replica:
                found = drained.stage_state(worker.stage, pipeline.cut.model)
                if worker.stage.index == 0:
                    found["place"] = pipeline.position.state()
                files[_name(0, worker.stage.index)] = found
        return files

    # ---------------------------------------------------------------- resuming

    def resume(self, folder: Path, data: Any) -> Resumed:
        pipeline, engine = self._pipeline, self._pipeline.engine
        folder = folder.absolute()
        self.wait()
        found, skipped = self._choose(folder)
        self._folders.add(folder)
        for words in skipped:
            if engine.rank == 0:
                warnings.warn(words, stacklevel=3)
        if found is None:
            return Resumed()
        assert found.manifest is not None
        compare_models(found.path, found.manifest, pipeline.cut.model)
        if found.manifest["kind"] == "exact":
            compare_facts(found.path, found.manifest, pipeline)
        with pipeline.stopping_on_error(), engine.between_steps(), torch.enable_grad():
            if found.manifest["kind"] == "exact":
                self._resume_exactly(found)
            else:
                self._resume_drained(found)
        pipeline.meet("resumed")  # who goes on early sends what others then clear away
        stored = tensorfile.read(found.path / DATA) if found.manifest["data"] else None
        if stored is not None and hasattr(data, "load_state_dict"):
            data.load_state_dict(stored)
        return Resumed(
            step=pipeline.position.step,
            data=stored,
            path=found.path,
            kind=found.manifest["kind"],
            skipped=tuple(skipped),
        )

    def _choose(self, folder: Path) -> tuple[Found | None, list[str]]:
        """The newest checkpoint that every process can use, and why newer ones were passed over."""
        _refuse_misplaced(folder)
        found = candidates(folder)
        rank_here = self._pipeline.engine.rank
        steps = [each.step for each in found]
        for rank, others in enumerate(self._pipeline.meet("checkpoints", steps)):
            if others is not LOST and others != steps:
                raise ConfigurationError(
                    f"rank {rank_here} finds the checkpoints of steps {steps} in {folder}, rank"
                    f" {rank} those of {others}: give a folder that all processes share."
                )
        skipped: list[str] = []
        for each in found:
            problems = self._pipeline.meet("problem", each.problem(self._needed(each)))
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
        facts = facts_of(self._pipeline)
        if any(manifest.get(name) != facts[name] for name in ("processes", "stages", "replicas")):
            return shared  # refused later, in words of its own
        return [*self._own_files(), *shared]

    def _own_files(self) -> list[str]:
        placement = self._pipeline.engine.placement
        return [
            _name(replica, stage)
            for replica in placement.replicas_here
            for stage in placement.stages_of(replica)
        ]

    def _resume_exactly(self, found: Found) -> None:
        pipeline, engine = self._pipeline, self._pipeline.engine
        states = [tensorfile.read(found.path / name) for name in self._own_files()]
        process = states[0]["process"]
        if not pipeline.is_built:
            pipeline.build(on_device({"first": process["first"]}, pipeline.setup.device)["first"])
        assert found.manifest is not None
        cuts = facts_of(pipeline)["cuts"]
        if cuts is not None and cuts != found.manifest["cuts"]:
            raise ConfigurationError(
                f"{found.path} was cut at {found.manifest['cuts']}, and the same first batch now"
                f" cuts at {cuts}: give cuts={found.manifest['cuts']}."
            )
        pipeline.discard()
        pipeline.position.load(on_device(process["place"], pipeline.setup.device))
        shift_s = process["clock"] - (time.time() - time.perf_counter())
        with engine.between_steps():
            for worker, state in zip(engine.workers, states, strict=True):
                pipeline.follow(worker, *state["began_at"])
                restore_worker(worker, state, pipeline.setup.device, shift_s)
        engine.ledger.go_on_from(process["ledger"].numpy().tobytes(), shift_s)
        engine.readings.go_on_from(process["readings"].numpy().tobytes())
        engine.updates.go_on_from(process["updates"].numpy().tobytes())
        set_generators(process["generators"], pipeline.setup.device)

    def _resume_drained(self, found: Found) -> None:
        pipeline, engine = self._pipeline, self._pipeline.engine
        manifest = found.manifest
        assert manifest is not None
        stages = range(manifest["stages"])
        states = [tensorfile.read(found.path / _name(0, stage)) for stage in stages]
        weights = torch.load(found.path / MODEL, weights_only=True, map_location="cpu")
        pipeline.discard()
        pipeline.models.load(weights)
        place = dict(states[0]["place"])
        if manifest["method"] != describe(pipeline.setup.course.method):
            place |= {"phase": 0, "steps_in_phase": 0}
        pipeline.position.load(on_device(place, pipeline.setup.device))

        def take_over() -> None:
            models = dict(zip(engine.placement.replicas_here, pipeline.models, strict=True))
            facts = facts_of(pipeline)
            same = all(manifest.get(name) == facts[name] for name in _OF_CORRECTIONS)
            for worker in engine.workers:
                drained.take_over(worker.stage, models[worker.stage.replica], states)
                if same:
                    worker.stage.corrector.load_state_dict(
                        on_device(states[worker.stage.index]["corrections"], pipeline.setup.device)
                    )
                if worker.averager is not None:
                    worker.averager.forget()

        if engine.workers:
            take_over()
        else:
            pipeline.when_built = take_over


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
