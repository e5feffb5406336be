"""Where a run stands, who looks at it while it goes on, and what it leaves on disk meanwhile."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from offbeat.app.experiment import Experiment
from offbeat.app.runs import RunWriter
from offbeat.engines.evaluation import Evaluation
from offbeat.errors import CheckpointError
from offbeat.stages.memory import StageMemory
from offbeat.trainer import Trainer

METRICS_EVERY = 10
"""Steps over which losses are averaged."""


@dataclass
class Progress:
    """Where a run stands."""

    epochs: int
    steps_per_epoch: int
    max_steps: int | None = None
    epoch: int = 0
    step: int = 0
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    """Of the steps since metrics were written last."""
    rows_per_s: float = 0.0
    evaluation: Evaluation | None = None
    memory: tuple[StageMemory, ...] = ()
    """Of every stage before the last drain, after which nothing is in flight."""
    _waiting: list[Tensor] = field(default_factory=list)

    @property
    def steps(self) -> int:
        steps = self.epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def add(self, loss: Tensor) -> None:
        """Of a step; on a GPU it is not read yet: who reads waits for all that is queued there."""
        self._waiting.append(loss)
        if not loss.is_cuda or self.step % METRICS_EVERY == 0:
            self.read_losses()

    def read_losses(self) -> None:
        for loss in map(float, self._waiting):
            self.loss = loss
            if not math.isnan(loss):
                self.losses.append(loss)
        self._waiting.clear()


class Watcher(Protocol):
    """Whoever looks at a run while it goes on."""

    def now(self, what: str) -> None:
        """What takes time now: loading, training, evaluating, storing."""

    def begin(self, trainer: Trainer, progress: Progress) -> None: ...
    def step(self, trainer: Trainer, progress: Progress) -> None: ...
    def evaluated(self, trainer: Trainer, progress: Progress) -> None: ...
    def end(self, status: str) -> None: ...


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

    def now(self, what: str) -> None:
        """Of no interest afterwards."""

    def step(self, trainer: Trainer, progress: Progress) -> None:
        if progress.step % METRICS_EVERY or not progress.losses:
            return
        mean = sum(progress.losses) / len(progress.losses)
        progress.losses.clear()
        rows_per_s = round(progress.rows_per_s, 2)
        self._add("step", progress, loss=mean, rows_per_s=rows_per_s, lr=trainer.learning_rate)

    def evaluated(self, _trainer: Trainer, progress: Progress) -> None:
        assert progress.evaluation is not None
        self._add("evaluation", progress, **asdict(progress.evaluation), of="average")

    def end(self, progress: Progress, status: str) -> None:
        self._add("end", progress, status=status)

    def _add(self, kind: str, progress: Progress, **values: Any) -> None:
        self.time_s = time.perf_counter() - self._began
        if self._writer is not None:
            epoch, time_s = progress.step / progress.steps_per_epoch, round(self.time_s, 4)
            place = {"step": progress.step, "epoch": round(epoch, 4), "time_s": time_s}
            self._writer.add(kind, **place, **values)


class Saver:
    """Saves checkpoints of a run, with where it stands."""

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
        with _telling(trainer):
            trainer.save(self._folder, keep=self._keep, data=place)

    def go_on_from(self, place: dict[str, Any]) -> None:
        self._progress.epoch, self._progress.step = place["epoch"], place["step"]
        self._progress.loss, self._progress.losses = place["loss"], place["losses"]
        self._recorder.go_on_from(place)

    def finish(self, trainer: Trainer) -> None:
        with _telling(trainer):
            trainer.finish_saving()


@contextmanager
def _telling(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        if trainer.rank == 0:
            print(f"not saved: {error}", file=sys.stderr)
