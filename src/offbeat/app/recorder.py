"""What a run leaves on disk while it goes on: metrics, and checkpoints to go on from."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbeat.app.experiment import Experiment
from offbeat.app.progress import METRICS_EVERY, Progress
from offbeat.app.runs import RunWriter
from offbeat.errors import CheckpointError
from offbeat.trainer import Trainer


class Recorder:
    """Writes the metrics as they come: losses averaged over a few steps, evaluations in full."""

    def __init__(self, writer: RunWriter | None) -> None:
        self._writer = writer
        self._began = time.perf_counter()
        self.time_s = 0.0

    def state(self) -> dict[str, Any]:
        passed = time.perf_counter() - self._began
        lines = 0 if self._writer is None else self._writer.lines
        return {"time_s": passed, "lines": lines}

    def go_on_from(self, state: dict[str, Any]) -> None:
        self._began = time.perf_counter() - state["time_s"]

    def place(self, progress: Progress) -> dict[str, Any]:
        self.time_s = time.perf_counter() - self._began
        epoch = progress.step / progress.steps_per_epoch
        return {"step": progress.step, "epoch": round(epoch, 4), "time_s": round(self.time_s, 4)}

    def step(self, trainer: Trainer, progress: Progress) -> None:
        if progress.step % METRICS_EVERY or not progress.losses:
            return
        mean = sum(progress.losses) / len(progress.losses)
        progress.losses.clear()
        if self._writer is not None:
            self._writer.add(
                "step",
                **self.place(progress),
                loss=mean,
                rows_per_s=round(progress.rows_per_s, 2),
                lr=trainer.learning_rate,
            )

    def evaluated(self, _trainer: Trainer, progress: Progress) -> None:
        if self._writer is not None:
            assert progress.evaluation is not None
            self._writer.add(
                "evaluation", **self.place(progress), **asdict(progress.evaluation), of="average"
            )


class Saver:
    """Saves checkpoints of a run, with what this module itself has to remember."""

    def __init__(
        self, experiment: Experiment, folder: Path, progress: Progress, recorder: Recorder
    ) -> None:
        self._every, self._keep = experiment.save_every, experiment.keep
        self._folder, self._progress, self._recorder = folder, progress, recorder

    @property
    def is_due(self) -> bool:
        return self._every is not None and self._progress.step % self._every == 0

    def save(self, trainer: Trainer) -> None:
        """A checkpoint that cannot be written is told, and training goes on."""
        progress = self._progress
        progress.read_losses()
        place = {
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.loss,
            "losses": list(progress.losses),
            **self._recorder.state(),
        }
        with _told(trainer):
            trainer.save(self._folder, keep=self._keep, data=place)

    def go_on_from(self, place: dict[str, Any]) -> None:
        self._progress.epoch, self._progress.step = place["epoch"], place["step"]
        self._progress.loss, self._progress.losses = place["loss"], place["losses"]
        self._recorder.go_on_from(place)

    def finish(self, trainer: Trainer) -> None:
        with _told(trainer):
            trainer.finish_saving()


@contextmanager
def _told(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        if trainer.rank == 0:
            print(f"not saved: {error}", file=sys.stderr)
