"""All checkpoints of one trainer: saving, and finding the newest that every process can use."""

import warnings
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch

from offbeat import __version__
from offbeat.checkpoints import drained, exact, tensorfile
from offbeat.checkpoints.facts import (
    compare_facts,
    compare_models,
    describe_model,
    facts_of,
    gone_of,
    placement_of,
)
from offbeat.checkpoints.folder import (
    DATA,
    FORMAT,
    Found,
    candidates,
    file_of,
    place_of,
    refuse_misplaced,
    refuse_strange,
)
from offbeat.checkpoints.writer import Order, Writer
from offbeat.engines.board import LOST
from offbeat.engines.pipeline import Pipeline
from offbeat.errors import CheckpointError, ConfigurationError, StorageError
from offbeat.methods.base import require_count
from offbeat.records import lock
from offbeat.records.lock import Lock, key_of, state_of, this_process


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


class Archive:
    """Every process calls alike."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._engine = pipeline, pipeline.engine
        self._writer = Writer(pipeline.engine)
        self._locks: dict[Path, Lock] = {}
        """Of the folders in which this run has saved."""
        self._agreed: set[Path] = set()
        """Those of which all processes that are there now know whose they are."""
        self._era = 0
        """The step of the return since when they have agreed."""
        self._known: dict[Path, set[str]] = {}
        """Stamps of the checkpoints that this run has written, or seen when it resumed."""

    def save(self, folder: Path, *, drain: bool, keep: int, wait: bool, data: Any) -> Path:
        pipeline = self._pipeline
        require_count("keep", keep)
        folder = folder.absolute()
        if not pipeline.is_built:
            raise CheckpointError(
                "there is nothing to save yet: the first step makes the stages. Save after it."
            )
        if self._era != self._engine.joined_at:
            self._agree_anew()
        if folder not in self._agreed:
            self._locks[folder] = self._take(folder)
            self._agreed.add(folder)
            self._engine.ledger.keep_in(folder)
            self._engine.ledger.cut_back()
        if drain:
            pipeline.drain()
        # The last write first: two snapshots at once would double what is held in memory.
        self.wait()
        gone: list[int] = []
        if drain:
            replica = drained.keeper(pipeline)
            ranks = self._engine.placement.row_of(replica)
            files = drained.files_of(pipeline, replica)
        else:
            files, gone = exact.files_of(pipeline)
            ranks = exact.ranks_without(gone, self._engine.placement)
        if data is not None and self._engine.rank == ranks[0]:
            # A copy: it is written while the loader goes on.
            files[DATA] = deepcopy(data.state_dict() if hasattr(data, "state_dict") else data)
        step = pipeline.position.step
        manifest = {
            "format": FORMAT,
            "kind": "drained" if drain else "exact",
            "step": step,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"offbeat": __version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "data": data is not None,
            **facts_of(pipeline),
            "processes": self._engine.size,
            "placement": self._engine.placement.ranks,
            "model": describe_model(pipeline.cut.model),
        }
        if gone:
            manifest["gone"] = gone
        ours = self._locks[folder], self._known.setdefault(folder, set())
        settle = self._engine.ledger.settle
        self._writer.start(Order(folder, step, keep, files, ranks, manifest, settle, *ours))
        if wait:
            self.wait()
        return place_of(folder, step)

    def _agree_anew(self) -> None:
        """After a return: all tell what they know, because those who came back know nothing."""
        self._era, trouble = self._engine.joined_at, None
        self._agreed.clear()
        try:
            self.wait()
        except CheckpointError as error:
            trouble = str(error)
        told = self._pipeline.meet("last checkpoint", trouble)
        trouble = next((text for text in told if text not in (None, LOST)), None)
        if trouble is not None:  # all raise, or those who did would miss the others' next meeting
            raise CheckpointError(trouble)

    def _take(self, folder: Path) -> Lock:
        """Holds a folder for all processes of this run; together they see all hosts it is on."""
        held = lock.holder(folder) or {}
        processes = held.get("processes", ())
        dead = [key_of(process) for process in processes if state_of(process) == "dead"]
        ours, known = self._locks.get(folder), self._known.get(folder)
        if known is not None:
            known &= {each.stamp for each in candidates(folder)}
        token, stamps = ours and ours.claim["token"], None if known is None else sorted(known)
        told = self._pipeline.meet("lock", [this_process(), dead, token, stamps])
        there = {rank: each for rank, each in enumerate(told) if each is not LOST}
        seen = [stamps for *_, stamps in there.values() if stamps is not None]
        if seen:
            self._known[folder] = {*chain(*seen)}
        taken, answer = Lock(folder), None
        if self._engine.rank == min(there):
            processes, theirs, tokens, _ = zip(*there.values(), strict=True)
            try:
                taken.take(processes, {*chain(*theirs)}, set(tokens) - {None})
                answer = taken.claim
                refuse_strange(folder, self._known.get(folder))
            except (CheckpointError, StorageError) as error:
                answer = {"problem": str(error)}
                taken.release()
            except OSError:  # which the writer will tell: training goes on
                answer = taken.claim
        answer = self._pipeline.meet("locked", answer)[min(there)]
        if "problem" in answer:
            raise CheckpointError(answer["problem"])
        taken.claim = answer
        return taken

    def wait(self) -> None:
        """Until everything is on disk; raises if the last checkpoint could not be written."""
        self._writer.wait()

    def resume(self, folder: Path, data: Any) -> Resumed:
        pipeline, engine = self._pipeline, self._engine
        folder = folder.absolute()
        self.wait()
        found, skipped = self._choose(folder)
        self._locks.pop(folder, None)
        self._agreed.discard(folder)
        for words in skipped:
            if engine.rank == 0:
                warnings.warn(words, stacklevel=3)
        if found is None:
            return Resumed()
        kind = found.manifest["kind"]
        compare_models(found.path, found.manifest, pipeline.cut.model)
        if kind == "exact":
            compare_facts(found.path, found.manifest, pipeline)
        with pipeline.stopping_on_error(), engine.between_steps(), torch.enable_grad():
            (exact if kind == "exact" else drained).resume(pipeline, found.path, found.manifest)
        pipeline.meet("resumed")  # who goes on early sends what others then clear away
        stored = tensorfile.read(found.path / DATA) if found.manifest["data"] else None
        if stored is not None and hasattr(data, "load_state_dict"):
            data.load_state_dict(stored)
        step = pipeline.position.step
        return Resumed(step=step, data=stored, path=found.path, kind=kind, skipped=tuple(skipped))

    def _choose(self, folder: Path) -> tuple[Found | None, list[str]]:
        """The newest checkpoint that every process can use, and why newer ones were passed over."""
        refuse_misplaced(folder)
        found = candidates(folder)
        self._known[folder] = {each.stamp for each in found}
        rank_here = self._engine.rank
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
        manifest = found.manifest
        shared = [DATA] if manifest.get("data") else []
        if manifest.get("kind") == "drained":
            stages = range(int(manifest.get("stages", 0)))
            return [drained.model_of(manifest), *(file_of(0, stage) for stage in stages), *shared]
        facts, saved, gone = facts_of(self._pipeline), placement_of(manifest), gone_of(manifest)
        differs = any(manifest.get(name) != facts[name] for name in ("stages", "replicas"))
        if saved is None or differs:
            return shared  # refused later, in words of its own
        if self._engine.needs_costs:  # which stages are here decides the batch that is stored
            left = (r for r in range(saved.replicas) if r not in gone)
            everything = ((r, k) for r in left for k in range(saved.stages))
            return [*starmap(file_of, everything), *shared]
        if not gone.isdisjoint(self._engine.placement.replicas_here):
            return shared  # this process ends, or all refuse
        needed = [exact.first_file(gone), *exact.files_for(self._engine.placement, saved)]
        return [*dict.fromkeys(needed), *shared]
