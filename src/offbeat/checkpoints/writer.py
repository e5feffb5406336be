"""Writing while training goes on: a thread per process, and an agreement when all have written."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offbeat.checkpoints import tensorfile, weights
from offbeat.checkpoints.folder import MODEL, candidates, partial_of, publish
from offbeat.engines.base import Engine, Notes
from offbeat.errors import CheckpointError, StorageError
from offbeat.records import disk
from offbeat.records.lock import Lock

_NICENESS = 10
"""A tenth of a busy core. With the lowest priority, 19, a checkpoint of several hundred megabytes
was not done after 50 steps, and the next one had to wait for it (benchmarks/faults)."""


@dataclass(frozen=True)
class Order:
    """One checkpoint to be written."""

    folder: Path
    step: int
    keep: int
    files: dict[str, Any]
    """What this process writes, by name."""
    ranks: Sequence[int]
    """Who writes a part of it; the first puts it together."""
    manifest: dict[str, Any]
    settle: Callable[[], None]
    """Brings to disk what the files refer to."""
    lock: Lock
    known: set[str]
    """Stamps of the checkpoints that this run may delete; that of this one is added."""


class Writer:
    """Writes one checkpoint at a time; a second waits for the first, so memory stays bounded."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._everyone: Notes | None = None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._era = self._count = 0
        """Since which return checkpoints are counted: who comes back knows of none before."""

    def start(self, order: Order) -> None:
        self.wait()
        if self._era != self._engine.joined_at:
            self._era, self._count, self._everyone = self._engine.joined_at, 0, None
        self._count += 1
        number = f"{self._era}/{self._count}"
        everyone = self._everyone = self._everyone or self._engine.notes()
        # On a GPU what is to be written is still being copied, in the caller's own stream.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def write() -> None:
            _step_back()
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._write(order, everyone, number)

        # Not a daemon: a script that ends after its last save still gets that checkpoint.
        self._thread = threading.Thread(target=write, name="offbeat-saving")
        self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is complete; raises if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, order: Order, everyone: Notes, number: str) -> None:
        first, rank, timeout_s = order.ranks[0], self._engine.rank, self._engine.timeout_s
        # The first waits for all parts, and the others also while it puts them together.
        deadline = time.monotonic() + (timeout_s if rank == first else 2 * timeout_s)

        def given_up() -> bool:
            """Whether it makes no sense to wait for the others any longer."""
            failing = not threading.main_thread().is_alive() and hasattr(sys, "last_value")
            return failing or self._engine.has_failed or time.monotonic() > deadline

        written, outcome = f"{number}/written", f"{number}/outcome"
        try:
            if rank in order.ranks:
                everyone.tell(written, _try(lambda: self._write_own(order)))
            if rank == first:
                notes = everyone.hear(written, order.ranks, given_up)
                everyone.tell(outcome, self._put_together(order, notes))
            # One process decides what became of it, so that all think alike: where one saves
            # again and another does not, they would wait for each other.
            (note,) = everyone.hear(outcome, [first], given_up)
            if note is None:
                note = {"problem": f"rank {first} did not say that all is written"}
            elif "problem" in note:
                self._make_room(order)
            else:
                order.known.add(note["stamp"])
        except RuntimeError as error:  # the store has gone, and with it everybody else
            note = {"problem": str(error).splitlines()[0]}
        if "problem" in note:
            self._error = _failed(order, note)

    def _write_own(self, order: Order) -> dict[str, Any]:
        aside = partial_of(order.folder, order.step)
        order.lock.check()
        disk.make_folder(aside)
        order.settle()
        return {"files": {name: _write_file(aside / name, v) for name, v in order.files.items()}}

    def _put_together(self, order: Order, notes: list[Any]) -> dict[str, Any]:
        trouble = _first_trouble(order.ranks, notes)
        if trouble is not None:
            return trouble
        files = {name: entry for note in notes for name, entry in note["files"].items()}
        manifest = {**order.manifest, "files": files}
        published = partial(publish, order.folder, order.step, manifest, order.keep, order.known)
        return _try(lambda: {"stamp": published()})

    def _make_room(self, order: Order) -> None:
        aside = partial_of(order.folder, order.step)
        for name in order.files:
            with suppress(OSError):  # what cannot be deleted was not written
                (aside / name).unlink()


def _step_back() -> None:
    """Gives this thread a low priority: training goes on with as many threads as before.

    On equal terms it would hold up one of them now and then, and with it all the others.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with suppress(OSError):  # a sandbox may forbid it; then the checkpoint is written anyway
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _write_file(path: Path, value: Any) -> dict[str, Any]:
    if path.name == MODEL:
        return tensorfile.write_chunks(path, weights.to_chunks(value))
    return tensorfile.write(path, value)


def _try(action: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    try:
        return action() or {}
    except (CheckpointError, StorageError) as error:
        return {"problem": str(error), "lasts": True}
    except OSError as error:
        words, where = disk.in_words(error), error.filename
        return {"problem": words if where is None else f"{words} ({where})"}
    except Exception as error:  # of anything else nobody would hear: this is a thread
        return {"problem": f"{type(error).__name__}: {error}", "lasts": True}


def _first_trouble(ranks: Sequence[int], notes: list[Any]) -> dict[str, Any] | None:
    for rank, note in zip(ranks, notes, strict=True):
        if note is None:
            return {"problem": f"rank {rank} did not say that it has written its part"}
        if "problem" in note:
            where = "" if len(notes) == 1 else f" (rank {rank})"
            return {**note, "problem": f"{note['problem'].rstrip('.')}{where}"}
    return None


def _failed(order: Order, note: dict[str, Any]) -> CheckpointError:
    try:
        left = candidates(order.folder)
        newest = (
            f"The newest complete one is {left[0].path}."
            if left
            else "There is no complete one in this folder."
        )
    except OSError as error:  # the folder itself may be the trouble
        newest = f"Its folder cannot be looked into ({error.strerror})."
    # What cannot be stored now cannot be stored later; a disk may have room again.
    lasts, again = note.get("lasts", False), "; the next save tries again"
    return CheckpointError(
        f"the checkpoint of step {order.step} could not be written to {order.folder}:"
        f" {note['problem'].rstrip('.')}. {newest} Training can go on{'' if lasts else again}."
    )
