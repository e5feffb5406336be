"""Carrying out a run: what ``offbeat train`` and ``offbeat study`` do."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, Self

from offbeat.app.build import build, check_batches, data_of, device_of
from offbeat.app.experiment import Experiment
from offbeat.app.progress import Progress, Recorder, Saver, Watcher
from offbeat.app.results import describe_run, summarize_run
from offbeat.app.runs import CHECKPOINTS, LEDGER, READINGS, RunWriter, held
from offbeat.checkpoints import save_weights
from offbeat.checkpoints.folder import candidates
from offbeat.errors import StorageError
from offbeat.methods.auto import show_on
from offbeat.trainer import Trainer
from offbeat.zoo import Data, Loader


def check_experiment(experiment: Experiment) -> None:
    """Refuses what could not be trained, without training it."""
    data = data_of(experiment)
    with show_on(StringIO()):  # to nobody: "auto" explains itself when it runs
        trainer = build(experiment, data, 1)
    check_batches(experiment, data, trainer)


def run_experiment(
    experiment: Experiment,
    folder: Path,
    watchers: Callable[[], list[Watcher]] = list,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains, stores all in ``folder``, returns the summary; ``resume``: from its checkpoint."""
    with _Interrupts() as interrupts, ExitStack() as until_the_end:
        return _run(experiment, folder, watchers, resume, interrupts, until_the_end)


def _run(
    experiment: Experiment,
    folder: Path,
    watchers: Callable[[], list[Watcher]],
    resume: bool,
    interrupts: "_Interrupts",
    until_the_end: ExitStack,
) -> dict[str, Any]:
    # Before there is a trainer only the launcher knows which process this is.
    shown = watchers() if os.environ.get("RANK", "0") == "0" else []
    now = partial(_tell, shown)
    now(f"loading {experiment.data.name}")
    data = data_of(experiment)
    loader = _loader_of(experiment, data)
    with show_on(sys.stdout):
        trainer = build(experiment, data, len(loader))
    check_batches(experiment, data, trainer)
    progress = Progress(experiment.epochs, len(loader), experiment.max_steps)
    if trainer.rank == 0:
        until_the_end.enter_context(held(folder))
    saved = trainer.resume(folder / CHECKPOINTS).data if resume else None
    writer = None
    if trainer.rank == 0:
        lines = (0 if saved is None else saved["lines"]) if resume else None
        writer = RunWriter(folder, describe_run(experiment, trainer), lines)
    recorder = Recorder(writer)
    saver = Saver(experiment, folder / CHECKPOINTS, progress, recorder)
    if saved is not None:
        saver.go_on_from(saved)
    watching = [recorder, *shown]
    training = _Training(experiment, data, loader, trainer, progress, watching, saver)
    status = "failed"
    try:
        for watcher in shown:
            watcher.begin(trainer, progress)
        now("training")
        status = training.run(interrupts.begin())
        now("storing what came out")
        saver.finish(trainer)
    finally:
        for watcher in shown:
            watcher.end(status)
        if status == "failed" and writer is not None:
            with suppress(StorageError):  # which may be what ended it
                recorder.end(progress, status)
            writer.close()
    # A hybrid clips first by stage and then by model, which no count tells apart.
    clip = experiment.clip if experiment.hybrid is None else None
    ledger, state = trainer.ledger, trainer.state_dict()
    readings = trainer.readings  # everything that all processes must be asked for, then the files
    summary = {"status": status} | summarize_run(trainer, ledger, progress, recorder.time_s, clip)
    if writer is not None:
        end = partial(recorder.end, progress, status)
        outcome: dict[str, Any] = {f"model.{experiment.model_file}": partial(save_weights, state)}
        outcome |= {READINGS: readings.save} if len(readings) else {}
        outcome |= {LEDGER: ledger.tail(4000).save}  # for a timeline; the summary has all counted
        stamps = {each.path.name: each.stamp for each in candidates(folder / CHECKPOINTS)}
        writer.finish(outcome, end, summary, ledger.certificate() | {"checkpoints": stamps})
    return summary


def _tell(watchers: Sequence[Watcher], what: str) -> None:
    for watcher in watchers:
        watcher.now(what)


def _loader_of(experiment: Experiment, data: Data) -> Loader:
    return data.loader(
        experiment.batch_size,
        seed=experiment.seed,
        device=device_of(experiment.device),
        augment=experiment.augment,
        drop_last=experiment.drop_last,
    )


@dataclass(frozen=True)
class _Training:
    """Epochs, steps, evaluations and checkpoints of one run."""

    experiment: Experiment
    data: Data
    loader: Loader
    trainer: Trainer
    progress: Progress
    watchers: list[Any]
    saver: Saver

    def run(self, interrupted: Callable[[], bool]) -> str:
        """To the end, or until somebody asks for one: "finished" or "interrupted"."""
        progress, epochs, most = self.progress, self.experiment.epochs, self.experiment.max_steps
        if most is not None and progress.step >= most:
            self._finish()  # a run taken up again after its last step
            return "finished"
        while progress.epoch < epochs:
            ended = self._run_epoch(interrupted)
            if ended is None:
                progress.epoch += 1
                ended = "finished" if progress.epoch == epochs else None
            if ended is not None:
                self._probe()
                self._finish()
                return ended
            if progress.epoch % self.experiment.evaluate_every == 0:
                self._probe()
                self._evaluate()
        return "finished"

    def _run_epoch(self, interrupted: Callable[[], bool]) -> str | None:
        """How the run ended within this epoch; None if it goes on."""
        trainer, progress = self.trainer, self.progress
        position = progress.step - progress.epoch * progress.steps_per_epoch
        # A run that was saved at the end of an epoch goes on with the evaluation.
        batches: Any = ()
        if position < progress.steps_per_epoch:
            self.loader.seek(progress.epoch, position)
            batches = trainer.batches(self.loader)
        parts = trainer.replicas // trainer.replicas_here
        began, rows = time.perf_counter(), 0
        for steps, (x, y) in enumerate(batches, 1):
            loss = trainer.step(x, y)
            progress.step += 1
            # Stages in the middle see no rows; the first one is the one that reports.
            rows += self.experiment.batch_size if x is None else parts * len(x)
            elapsed = time.perf_counter() - began
            progress.rows_per_s = rows / elapsed
            if loss is not None:
                progress.add(loss)
            for watcher in self.watchers:
                watcher.step(trainer, progress)
            done = progress.step == self.experiment.max_steps
            stopped = not done and trainer.stop_together(interrupted(), steps / elapsed)
            if stopped or self.saver.is_due:
                self.saver.save(trainer)
            if done or stopped:
                return "finished" if done else "interrupted"
        return None

    def _probe(self) -> None:
        """On the first test batch, which is the same every time; before a drain ends all lag."""
        experiment, trainer = self.experiment, self.trainer
        if experiment.monitor and any(trainer.lags):
            loader = self.data.test_loader(experiment.batch_size, device=experiment.device)
            for x, y in islice(trainer.batches(loader), 1):
                trainer.probe(x, y)

    def _finish(self) -> None:
        self.progress.memory = self.trainer.memory()
        self.trainer.flush()
        self._evaluate()

    def _evaluate(self) -> None:
        size = max(self.experiment.batch_size, 256)
        loader = self.data.test_loader(size, device=self.experiment.device)
        for watcher in self.watchers:
            watcher.now("evaluating")
        self.progress.evaluation = self.trainer.evaluate(loader)
        for watcher in self.watchers:
            watcher.now("training")
            watcher.evaluated(self.trainer, self.progress)


class _Interrupts:
    """Ctrl-C or SIGTERM asks a run to stop after a step; asked often enough it ends where it is.

    The same words hold until everything is stored: a second signal may come at any moment.
    """

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def begin(self) -> Callable[[], bool]:
        """From here on signals are counted; the result says whether there was one."""
        if threading.current_thread() is threading.main_thread():  # elsewhere others handle them
            for each in (signal.SIGINT, signal.SIGTERM):
                self._before[each] = signal.signal(each, self._ask)
        return lambda: self._count > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _ask(self, *_: object) -> None:
        self._count += 1
        if self._count == 1:
            # Not print: a signal during another's print is an error in Python.
            os.write(
                2,
                b"stopping after this step (in all processes the same, within seconds); Ctrl-C"
                b" twice more stops at once and keeps nothing that is not saved yet\n",
            )
        if self._count == 3:  # not 2: a terminal and torchrun each send one of their own
            raise KeyboardInterrupt
