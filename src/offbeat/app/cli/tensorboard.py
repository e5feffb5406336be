"""TensorBoard events, if asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.app.progress import METRICS_EVERY, Progress
from offbeat.errors import MissingExtra
from offbeat.trainer import Trainer


class TensorBoard:
    """Writes scalars beside the run."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra(
                "--tensorboard needs TensorBoard, which is missing: pip install tensorboard"
            ) from error
        self._open: Callable[[], Any] = lambda: SummaryWriter(str(folder))

    def begin(self, trainer: Trainer, progress: Progress) -> None:
        self._writer = self._open()  # not before the folder is known to be free

    def step(self, trainer: Trainer, progress: Progress) -> None:
        if progress.step % METRICS_EVERY == 0:
            self._add("train/loss", progress.loss, progress)
            self._add("train/rows_per_s", progress.rows_per_s, progress)
            if trainer.learning_rate is not None:
                self._add("train/learning_rate", trainer.learning_rate, progress)

    def evaluated(self, trainer: Trainer, progress: Progress) -> None:
        assert progress.evaluation is not None
        self._add("test/loss", progress.evaluation.loss, progress)
        if progress.evaluation.accuracy is not None:
            self._add("test/accuracy", progress.evaluation.accuracy, progress)

    def end(self, status: str) -> None:
        self._writer.close()

    def _add(self, name: str, value: float, progress: Progress) -> None:
        self._writer.add_scalar(name, value, progress.step)
