"""Who shows a run while it goes on: a live table, lines for a log."""

import time

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.app.progress import Progress
from offbeat.trainer import Trainer


class Lines:
    """One line per evaluation, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.perf_counter()

    def now(self, what: str) -> None:
        pass

    def begin(self, trainer: Trainer, progress: Progress) -> None:
        whole = progress.epochs * progress.steps_per_epoch
        short = "" if progress.steps == whole else f", of which the first {progress.steps} are made"
        self._say(
            f"{_what(trainer)}: {progress.epochs} epochs of {progress.steps_per_epoch} steps{short}"
        )
        if progress.step:
            self._say(f"going on after step {progress.step}")

    def step(self, trainer: Trainer, progress: Progress) -> None:
        pass

    def evaluated(self, trainer: Trainer, progress: Progress) -> None:
        test = progress.evaluation
        assert test is not None
        accuracy = "" if test.accuracy is None else f", accuracy {test.accuracy:.2%}"
        rest = progress.step % progress.steps_per_epoch
        place = f"{progress.epoch}/{progress.epochs}" + (f" and {rest} steps" if rest else "")
        self._say(
            f"epoch {place}: test loss {test.loss:.4f}{accuracy},"
            f" {progress.rows_per_s:.0f} rows/s, {time.perf_counter() - self._began:.1f} s"
        )

    def end(self, status: str) -> None:
        self._say(f"{status} after {time.perf_counter() - self._began:.1f} s")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class Screen:
    """A table that is drawn again twice a second."""

    def __init__(self, console: Console) -> None:
        # Drawn between steps, by nobody's thread: a thread of its own would take turns with them.
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = 0.0
        self._now = ""
        self._seen: tuple[Trainer, Progress] | None = None

    def now(self, what: str) -> None:
        """Drawn at once: whatever comes next may take long."""
        self._now = what
        if self._seen is not None:
            self._draw(*self._seen)
        else:
            self._live.console.print(f"{what} ...", style="dim", highlight=False, markup=False)

    def begin(self, trainer: Trainer, progress: Progress) -> None:
        self._began = time.perf_counter()
        self._first, self._read = progress.step, len(trainer.own_ledger)  # of a run that goes on
        self._live.start()
        self._draw(trainer, progress)

    def step(self, trainer: Trainer, progress: Progress) -> None:
        if time.perf_counter() - self._drawn > 0.5:
            self._draw(trainer, progress)

    def evaluated(self, trainer: Trainer, progress: Progress) -> None:
        self._draw(trainer, progress)

    def end(self, status: str) -> None:
        self._now = ""
        if self._seen is not None:
            self._draw(*self._seen)
        self._live.stop()
        self._live.console.print(status, highlight=False)

    def _draw(self, trainer: Trainer, progress: Progress) -> None:
        self._drawn, self._seen = time.perf_counter(), (trainer, progress)
        self._live.update(self._view(trainer, progress), refresh=True)

    def _view(self, trainer: Trainer, progress: Progress) -> Table:
        passed = time.perf_counter() - self._began
        taken = progress.step - self._first
        left = passed / taken * (progress.steps - progress.step) if taken else 0.0
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(
            f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}",
            f"step {progress.step}/{progress.steps}",
            f"loss {progress.loss:.4f}",
            _score(progress),
            f"{progress.rows_per_s:.0f} rows/s",
            f"{_clock(left)} left" if taken else "- left",
        )
        stages = Table(box=None, pad_edge=False)
        stages.add_column("stage")
        for stage in range(trainer.stages):
            stages.add_column(str(stage), justify="right")
        stages.add_row("lag", *map(str, trainer.lags))
        stages.add_row("busy", *self._busy_shares(trainer))
        bar = ProgressBar(total=max(1, progress.steps), completed=progress.step, width=60)
        view = Table.grid()
        state = Text(self._now, style="dim")
        for part in (Text(_what(trainer), style="bold"), bar, numbers, stages, state):
            view.add_row(part)
        return view

    def _busy_shares(self, trainer: Trainer) -> list[str]:
        """Of the last few seconds, by the entries that are new since the last look."""
        ledger, since = trainer.own_ledger, self._read
        if since == len(ledger):
            return ["-"] * trainer.stages
        self._read = len(ledger)
        shares = ledger.busy_shares(trainer.stages, ledger[since].replica, since)
        return [f"{share:.0%}" if share else "-" for share in shares]


def _what(trainer: Trainer) -> str:
    replicas = "" if trainer.replicas == 1 else f", {trainer.replicas} replicas"
    count = f"{trainer.stages} stage{'s' if trainer.stages > 1 else ''}"
    where = "" if trainer.mesh_size == 1 else f", {trainer.mesh_size} processes"
    phases = [
        method.title if updates is None else f"{method.title} for {updates} updates"
        for method, updates in trainer.phases
    ]
    how = ", ".join([", then ".join(phases), *(c.title.lower() for c in trainer.corrections)])
    return f"{how}, {count}{replicas}{where}, lag {' '.join(map(str, trainer.lags))}"


def _score(progress: Progress) -> str:
    test = progress.evaluation
    if test is None:
        return "test -"
    return f"test loss {test.loss:.4f}" if test.accuracy is None else f"test {test.accuracy:.2%}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
