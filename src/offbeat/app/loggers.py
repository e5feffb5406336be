"""Who keeps the numbers of a run elsewhere: TensorBoard, or a class of yours with three verbs."""

import math
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from offbeat.app.experiment import Experiment
from offbeat.app.progress import METRICS_EVERY, Progress
from offbeat.app.results import describe_run
from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.trainer import Trainer


class Logger(Protocol):
    """What ``--logger`` takes; made without arguments, in the first process alone."""

    def begin(self, config: dict[str, Any]) -> None:
        """``config``: what ``config.json`` holds."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """``train/loss``, ``train/rows_per_s``, ``train/learning_rate`` every ten steps,
        ``test/loss`` and ``test/accuracy`` at evaluations; a step may come twice."""

    def end(self, status: str) -> None:
        """``status``: finished, interrupted or failed."""


def logger_named(text: str) -> Logger:
    """The logger of a class, as ``tracking:WandB``; a module is looked for here, too."""
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ConfigurationError(
            f"--logger {text!r}: give a module and a class, as in tracking:WandB for the class"
            " WandB in tracking.py."
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(import_module(module), name)()
    except ImportError as error:
        raise ConfigurationError(
            f"--logger {text!r}: {error}. The module is looked for in {here} and among what is"
            " installed."
        ) from error
    except AttributeError as error:
        raise ConfigurationError(
            f"--logger {text!r}: {error}. Give a class that {module} has."
        ) from error
    missing = [verb for verb in ("begin", "log", "end") if not callable(getattr(made, verb, None))]
    if missing:
        raise ConfigurationError(
            f"--logger {text!r}: it has no {' and no '.join(missing)}. A logger has begin(config),"
            " log(numbers, step) and end(status)."
        )
    logger: Logger = made
    return logger


class Logging:
    """Tells a logger what a watcher sees."""

    def __init__(self, logger: Logger, experiment: Experiment) -> None:
        self._logger, self._experiment = logger, experiment
        self._begun = False

    def now(self, what: str) -> None:
        pass

    def begin(self, trainer: Trainer, progress: Progress) -> None:
        self._logger.begin(describe_run(self._experiment, trainer))
        self._begun = True

    def step(self, trainer: Trainer, progress: Progress) -> None:
        if progress.step % METRICS_EVERY:
            return
        numbers = {"train/loss": progress.loss, "train/rows_per_s": progress.rows_per_s}
        if trainer.learning_rate is not None:
            numbers["train/learning_rate"] = trainer.learning_rate
        if math.isnan(progress.loss):  # the pipe fills
            del numbers["train/loss"]
        self._logger.log(numbers, progress.step)

    def evaluated(self, trainer: Trainer, progress: Progress) -> None:
        assert progress.evaluation is not None
        numbers = {"test/loss": progress.evaluation.loss}
        if progress.evaluation.accuracy is not None:
            numbers["test/accuracy"] = progress.evaluation.accuracy
        self._logger.log(numbers, progress.step)

    def end(self, status: str) -> None:
        if self._begun:
            self._logger.end(status)


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

    def begin(self, config: dict[str, Any]) -> None:
        self._writer = self._open()  # not before the folder is known to be free

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def end(self, status: str) -> None:
        self._writer.close()
