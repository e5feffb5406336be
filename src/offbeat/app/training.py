"""From an experiment to a stored run: what ``offbeat train`` and ``offbeat study`` do."""

import io
import math
import platform
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from offbeat import __version__
from offbeat.app.experiment import Experiment
from offbeat.app.runs import CHECKPOINTS, MODEL, READINGS, RunWriter
from offbeat.averaging import Averaging, averaging_named
from offbeat.averaging.sharding import shards_of
from offbeat.corrections import Correction, Monitor, correction_named
from offbeat.engines.evaluation import Evaluation
from offbeat.errors import BatchError, CheckpointError, ConfigurationError
from offbeat.guards import Guards, Update, Updates
from offbeat.methods import Method, Phases, Synchronous, method_named
from offbeat.methods.auto import Auto, settings_of, shown_on
from offbeat.optimizers import Muon
from offbeat.stages.memory import StageMemory
from offbeat.trainer import Trainer
from offbeat.zoo import Data, data_named, network_for

METRICS_EVERY = 10
"""Steps over which losses are averaged."""
_LEDGER_ENTRIES = 4000
"""Kept of a run's ledger for its timeline; lags and waits are counted over the whole run."""


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

    def begin(self, trainer: Trainer, progress: Progress) -> None: ...
    def step(self, trainer: Trainer, progress: Progress) -> None: ...
    def evaluated(self, trainer: Trainer, progress: Progress) -> None: ...
    def end(self, status: str) -> None: ...


def check_experiment(experiment: Experiment) -> None:
    """Refuses what could not be trained, without training it."""
    data = data_of(experiment)
    with redirect_stdout(io.StringIO()):  # "auto" explains itself when it runs
        trainer = build(experiment, data, 1)
    _check_batches(experiment, data, trainer)


def _check_batches(experiment: Experiment, data: Data, trainer: Trainer) -> None:
    """Whether the first and the last batch of an epoch can be trained on, before either is."""
    parts = _parts_of_batches(trainer)
    size, drop_last = experiment.batch_size, experiment.drop_last
    count = data.train.count(size, train=True, drop_last=drop_last)
    for number in {0, count - 1}:
        x, _ = data.train.batch(size, number, train=True, augment=False, seed=0, epoch=0)
        rows = torch.zeros(len(x), device=trainer.device)
        try:
            part = shards_of(rows, parts)[0]
            trainer.check_batch(part, part)
        except BatchError as error:
            last = " It is the last of an epoch: --drop-last leaves it out." if number else ""
            raise ConfigurationError(f"{error}{last}") from None


def _parts_of_batches(trainer: Trainer) -> int:
    """Among how many processes the rows of a batch are divided."""
    return trainer.replicas // trainer.replicas_here


def run_experiment(
    experiment: Experiment,
    folder: Path,
    watchers: Callable[[], list[Watcher]] = list,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains, stores everything in ``folder`` and returns the summary.

    ``resume``: goes on from the newest checkpoint in the folder, if there is one.
    """
    device = device_of(experiment.device)
    data = data_of(experiment)
    loader = data.loader(
        experiment.batch_size,
        seed=experiment.seed,
        device=device,
        augment=experiment.augment,
        drop_last=experiment.drop_last,
    )
    with shown_on(sys.stdout):
        trainer = build(experiment, data, len(loader))
    _check_batches(experiment, data, trainer)
    progress = Progress(experiment.epochs, len(loader), experiment.max_steps)
    looking = watchers() if trainer.rank == 0 else []
    found = trainer.resume(folder / CHECKPOINTS).data if resume else None
    writer = None
    if trainer.rank == 0:
        lines = (0 if found is None else found["lines"]) if resume else None
        writer = RunWriter(folder, _described(experiment, trainer), lines)
    recorder = Recorder(writer)
    saver = Saver(experiment, folder / CHECKPOINTS, progress, recorder)
    if found is not None:
        saver.go_on_from(found)
    status = "failed"
    try:
        for watcher in looking:
            watcher.begin(trainer, progress)
        with _counting_interrupts() as interrupted:
            everyone = [recorder, *looking]
            status = _train(
                experiment, data, loader, trainer, progress, everyone, saver, interrupted
            )
        saver.finish(trainer)
    finally:
        for watcher in looking:
            watcher.end(status)
        if status == "failed" and writer is not None:
            writer.add("end", **recorder.place(progress), status=status)
            writer.close()
    # A hybrid clips first by stage and then by model, which no count tells apart.
    clip = experiment.clip if experiment.hybrid is None else None
    return _finish(trainer, progress, recorder, writer, status, clip)


def _drain(trainer: Trainer, progress: Progress) -> None:
    progress.memory = trainer.memory()
    trainer.flush()


def _train(
    experiment: Experiment,
    data: Data,
    loader: Any,
    trainer: Trainer,
    progress: Progress,
    watchers: list[Any],
    saver: "Saver",
    interrupted: Callable[[], bool],
) -> str:
    if experiment.max_steps is not None and progress.step >= experiment.max_steps:
        _drain(trainer, progress)  # a run taken up again after its last step
        _evaluate(experiment, data, trainer, progress, watchers)
        return "finished"
    while progress.epoch < experiment.epochs:
        position = progress.step - progress.epoch * progress.steps_per_epoch
        # A run that was saved at the end of an epoch goes on with the evaluation.
        batches: Any = ()
        if position < progress.steps_per_epoch:
            loader.seek(progress.epoch, position)
            batches = trainer.batches(loader)
        parts = _parts_of_batches(trainer)
        began, rows = time.perf_counter(), 0
        for steps, (x, y) in enumerate(batches, 1):
            loss = trainer.step(x, y)
            progress.step += 1
            # Stages in the middle see no rows; the first one is the one that reports.
            rows += experiment.batch_size if x is None else parts * len(x)
            elapsed = time.perf_counter() - began
            progress.rows_per_s = rows / elapsed
            if loss is not None:
                progress.add(loss)
            for watcher in watchers:
                watcher.step(trainer, progress)
            done = progress.step == experiment.max_steps
            stopped = not done and trainer.stop_together(interrupted(), steps / elapsed)
            if stopped or saver.is_due:
                saver.save(trainer)
            if done or stopped:
                _probe(experiment, data, trainer)
                _drain(trainer, progress)
                _evaluate(experiment, data, trainer, progress, watchers)
                return "finished" if done else "interrupted"
        progress.epoch += 1
        last = progress.epoch == experiment.epochs
        due = last or progress.epoch % experiment.evaluate_every == 0
        if due:
            _probe(experiment, data, trainer)
        if last:
            _drain(trainer, progress)
        if due:
            _evaluate(experiment, data, trainer, progress, watchers)
    return "finished"


def _probe(experiment: Experiment, data: Data, trainer: Trainer) -> None:
    """On the first test batch, which is the same every time; before a drain, which ends lag."""
    if not experiment.monitor or not any(trainer.lags):
        return
    loader = data.test_loader(experiment.batch_size, device=experiment.device)
    for x, y in islice(trainer.batches(loader), 1):
        trainer.probe(x, y)


def _evaluate(
    experiment: Experiment, data: Data, trainer: Trainer, progress: Progress, watchers: list[Any]
) -> None:
    size = max(experiment.batch_size, 256)
    progress.evaluation = trainer.evaluate(data.test_loader(size, device=experiment.device))
    for watcher in watchers:
        watcher.evaluated(trainer, progress)


# ------------------------------------------------------------------------- building


def data_of(experiment: Experiment) -> Data:
    choice = experiment.data
    if "folder" in choice.settings:
        raise ConfigurationError(
            f"data {choice.name}: the folder is given by --data-folder, not as a setting:"
            f" --data-folder {choice.settings['folder']}."
        )
    return data_named(choice.name, folder=experiment.data_folder, **choice.settings)


def build(experiment: Experiment, data: Data, steps_per_epoch: int) -> Trainer:
    """The trainer an experiment describes."""
    torch.manual_seed(experiment.seed)
    model = network_for(data, experiment.model.name, **experiment.model.settings)
    cuts: Any = [int(cut) if cut.isdigit() else cut for cut in experiment.cuts] or None
    return Trainer(
        model.to(device_of(experiment.device)),
        loss=data.loss,
        optimizer=optimizer_factory(experiment),
        method=method_of(experiment, steps_per_epoch),
        corrections=corrections_of(experiment) or None,
        monitor=Monitor(probe=True) if experiment.monitor else None,
        stages=experiment.stages,
        cuts=cuts,
        ppv=experiment.ppv or None,
        replicas=experiment.replicas,
        averaging=averaging_of(experiment),
        scheduler=scheduler_factory(experiment, experiment.epochs * steps_per_epoch),
        clip=experiment.clip,
        guards=guards_of(experiment),
        seed=experiment.seed,
        autocast=torch.bfloat16 if experiment.autocast else None,
        engine=experiment.engine,  # type: ignore[arg-type]  # checked by the trainer
        balance=experiment.balance,  # type: ignore[arg-type]
        compile=experiment.compile,
    )


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise ConfigurationError(f"device={name!r}: give cpu, cuda or cuda:1.") from None
    if device.type == "meta":
        raise ConfigurationError(f"device={name!r}: it holds no numbers. Give --device cpu.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device={name!r}: PyTorch sees no GPU here. Give --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device={name!r}: PyTorch sees {torch.cuda.device_count()} GPUs here, counted from 0."
            " Give the number of one of them."
        )
    if device.type != "cuda":  # there a tensor would take memory of a GPU that others use
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, ImportError, AssertionError):
            raise ConfigurationError(
                f"device={name!r}: PyTorch cannot use it here. Give --device cpu."
            ) from None
    return device


def method_of(experiment: Experiment, steps_per_epoch: int) -> Method | Auto:
    name = experiment.method.name
    if name.lower() == "auto":
        return _auto(experiment)
    method = method_named(name, **experiment.method.settings)
    if experiment.hybrid is None:
        return method
    return Phases((method, experiment.hybrid * steps_per_epoch), (Synchronous(), None))


def _auto(experiment: Experiment) -> Auto:
    if experiment.hybrid is not None:
        raise ConfigurationError(
            "hybrid with method auto: run auto once, and give the method it prints by its name."
        )
    settings = experiment.method.settings
    odd = sorted(set(settings) - {"hop"})
    if odd:
        raise ConfigurationError(f"auto has no setting {odd[0]!r}: it takes hop.")
    return Auto(batch=max(1, experiment.batch_size // experiment.replicas), **settings)


def corrections_of(experiment: Experiment) -> list[Correction]:
    return [correction_named(choice.name, **choice.settings) for choice in experiment.correction]


def averaging_of(experiment: Experiment) -> Averaging | None:
    choice = experiment.averaging
    if choice is not None and experiment.replicas == 1:
        raise ConfigurationError(
            f"averaging={choice} with one replica has nobody to average with: give replicas=2 or"
            " more (--replicas), or leave it out."
        )
    return None if choice is None else averaging_named(choice.name, **choice.settings)


def guards_of(experiment: Experiment) -> Guards | None:
    nonfinite, max_lag = experiment.nonfinite, experiment.max_lag
    if nonfinite is None and max_lag is None:
        return None
    return Guards(nonfinite=nonfinite or "warn", max_lag=max_lag)  # type: ignore[arg-type]  # checked there


def optimizer_factory(
    experiment: Experiment,
) -> Callable[[list[nn.Parameter]], Optimizer | list[Optimizer]]:
    """One optimizer per stage; Muon gets the matrices and AdamW the rest."""
    lr, decay, momentum = experiment.lr, experiment.weight_decay, experiment.momentum
    # CUDA graphs read a rate that changes from the device; corrections need it on the host.
    recorded = experiment.engine == "streams" and not experiment.correction

    def checked(params: list[nn.Parameter]) -> Optimizer | list[Optimizer]:
        try:
            return make(params)
        except ValueError as error:
            raise ConfigurationError(
                f"optimizer {experiment.optimizer} with lr={lr}, momentum={momentum} and"
                f" weight_decay={decay}: {error}. Give numbers that it takes."
            ) from None

    def make(params: list[nn.Parameter]) -> Optimizer | list[Optimizer]:
        rate: Any = torch.tensor(lr, device=params[0].device) if recorded else lr
        if experiment.optimizer == "sgd":
            fused = True if recorded else None
            return torch.optim.SGD(
                params, lr=rate, momentum=momentum, weight_decay=decay, fused=fused
            )
        if experiment.optimizer == "adam":
            return torch.optim.Adam(params, lr=rate, weight_decay=decay, capturable=recorded)
        if experiment.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=rate, weight_decay=decay, capturable=recorded)
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        made: list[Optimizer] = []
        if matrices:
            made.append(Muon(matrices, lr=rate, momentum=momentum, weight_decay=decay))
        if others:
            rest = torch.optim.AdamW(others, lr=rate, weight_decay=decay, capturable=recorded)
            made.append(rest)
        return made

    return checked


def scheduler_factory(experiment: Experiment, updates: int) -> Callable[[Optimizer], LambdaLR]:
    """The learning rate by update, as a share of its peak."""
    warmup = experiment.warmup
    if experiment.decay == "one-cycle" and not warmup:
        warmup = updates // 4

    def share(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        done = (update - warmup) / max(1, updates - warmup)
        if experiment.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if experiment.decay in ("linear", "one-cycle"):
            return max(0.01, 1 - done)
        if experiment.decay == "step":
            passed = sum(update >= milestone * updates for milestone in experiment.milestones)
            return float(0.1**passed)
        return 1.0

    return lambda optimizer: LambdaLR(optimizer, share)


# ------------------------------------------------------------------------- stopping and storing


_PATIENCE = 3
"""Interrupts after which a run ends at once: a terminal and torchrun each send one of their own."""


@contextmanager
def _counting_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM asks a run to stop after a step; asked often enough it ends where it is."""
    count = 0

    def ask(*_: object) -> None:
        nonlocal count
        count += 1
        if count == 1:
            print(
                "stopping after this step (in all processes the same, within seconds); Ctrl-C twice"
                " more stops at once and keeps nothing that is not saved yet",
                file=sys.stderr,
            )
        if count == _PATIENCE:
            raise KeyboardInterrupt

    try:
        before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: somebody else handles signals
        yield lambda: False
        return
    try:
        yield lambda: count > 0
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Saver:
    """Saves checkpoints of a run, with what this module itself has to remember."""

    def __init__(
        self, experiment: Experiment, folder: Path, progress: Progress, recorder: "Recorder"
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


def _described(experiment: Experiment, trainer: Trainer) -> dict[str, Any]:
    return {
        **experiment.as_dict(),
        **_planned(trainer),
        "lags": list(trainer.lags),
        "stages": trainer.stages,
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "processes": trainer.mesh_size,
        "versions": {
            "offbeat": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }


def _planned(trainer: Trainer) -> dict[str, Any]:
    """What "auto" came to, in the words in which a configuration says it."""
    plan = trainer.plan
    if plan is None:
        return {}
    method = {"name": plan.method.name, "settings": settings_of(plan.method)}
    chosen = [{"name": c.name, "settings": settings_of(c)} for c in trainer.corrections]
    return {"plan": {"method": method, "correction": chosen, "reasons": list(plan.reasons)}}


def _finish(
    trainer: Trainer,
    progress: Progress,
    recorder: Recorder,
    writer: RunWriter | None,
    status: str,
    clip: float | None,
) -> dict[str, Any]:
    """Everything that all processes must be asked for, then the files."""
    ledger, state = trainer.ledger, trainer.state_dict()
    readings = trainer.readings
    found = progress.evaluation
    stages, replicas = range(trainer.stages), range(trainer.replicas)
    lags = {k: Counter(lag for r in replicas for lag in ledger.lags(k, r).values()) for k in stages}
    waits = {f"{r}/{k}": list(ledger.waits(k, r).values()) for r in replicas for k in stages}
    summary = {
        "status": status,
        "steps": progress.step,
        "epochs": progress.step / progress.steps_per_epoch,
        "time_s": recorder.time_s,
        "loss": None if found is None else found.loss,
        "accuracy": None if found is None else found.accuracy,
        "rows_per_s": progress.rows_per_s,
        "lags": {str(k): {str(lag): of[lag] for lag in sorted(of)} for k, of in lags.items()},
        "memory": [asdict(of_stage) for of_stage in progress.memory],
        "waits": {
            name: {"averages": len(s), "total_s": sum(s), "longest_s": max(s)}
            for name, s in waits.items()
            if s
        },
        "guards": guarded(
            trainer.updates, clip, by_model=trainer.method.schedule(trainer.stages).synchronous
        ),
        "busy_share": busy_shares(ledger, trainer.stages),
        "cuts": None if trainer.cuts is None else list(trainer.cuts),
    }
    if writer is not None:
        writer.add("end", **recorder.place(progress), status=status)
        torch.save(state, writer.folder / MODEL)
        if len(readings):
            readings.save(writer.folder / READINGS)
        writer.finish(summary, ledger.tail(_LEDGER_ENTRIES))
    return summary


def guarded(
    updates: Updates, clip: float | None = None, *, by_model: bool = False
) -> dict[str, dict[str, Any]]:
    """What the guards saw, by replica and stage; empty without guards.

    ``clip``: the bound on norms, of each stage or, ``by_model``, of all stages together.
    """
    squares: dict[tuple[int, int], float] = defaultdict(float)
    places: dict[str, list[Update]] = defaultdict(list)
    for update in updates:
        squares[update.replica, update.update] += update.norm**2
        places[f"{update.replica}/{update.stage}"].append(update)

    def is_clipped(update: Update) -> bool:
        norm = math.sqrt(squares[update.replica, update.update]) if by_model else update.norm
        return clip is not None and update.outcome == "applied" and norm > clip

    found = {}
    for place, of in places.items():
        norms = [update.norm for update in of if math.isfinite(update.norm)]
        outcomes = Counter(update.outcome for update in of)
        found[place] = {
            "updates": len(of),
            "dropped": len(of) - outcomes["applied"],
            "skipped": outcomes["skipped"],
            "rolled_back": outcomes["rolled back"],
            "clipped": None if clip is None else sum(map(is_clipped, of)),
            "not_finite": len(of) - len(norms),
            "median_norm": median(norms) if norms else None,
            "largest_norm": max(norms, default=0.0),
            "largest_lag": max(update.lag for update in of),
        }
    return found


def busy_shares(ledger: Any, stages: int) -> list[float]:
    """Of the time from the first action to the last, what each stage of replica 0 worked."""
    first, last = math.inf, -math.inf
    work = [0.0] * stages
    for entry in ledger:
        if entry.replica == 0 and entry.kind in "FBU":
            first, last = min(first, entry.start_s), max(last, entry.end_s)
            work[entry.stage] += entry.end_s - entry.start_s
    return [w / (last - first) if last > first else 0.0 for w in work]
