"""The trainer: the one object a user drives."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.cut import Model, outputs_of, plan_cut
from offbeat.errors import BatchError, ConfigurationError, StoppedError
from offbeat.heads import default_head
from offbeat.ledger import Ledger
from offbeat.memory import StageMemory
from offbeat.methods import DGL, Method, Synchronous, method_named
from offbeat.nest import Nest
from offbeat.optimizers import OptimizerFactory, SchedulerFactory, attach_optimizers
from offbeat.rng import seed_for, seeded
from offbeat.schedule import Schedule
from offbeat.stage import Loss, Stage
from offbeat.transport import Key
from offbeat.transport.memory import Memory
from offbeat.worker import Choose, Target, Worker, run_together, updates_last


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over all rows; ``accuracy`` where the targets are class numbers."""

    loss: float
    accuracy: float | None
    rows: int


@dataclass(frozen=True)
class _Fed:
    """A batch whose loss has not been handed out yet."""

    first_micro_batch: int
    shares: tuple[float, ...]


class Trainer:
    """Trains a model cut into stages, by any method, exactly.

    >>> import torch
    >>> from torch import nn
    >>> import offbeat
    >>> trainer = offbeat.Trainer(
    ...     nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
    ...     loss=nn.functional.cross_entropy,
    ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ...     method=offbeat.StaleWeights(),
    ...     cuts=[2],
    ... )
    >>> trainer.lags
    (2, 0)
    >>> losses = [trainer.step(torch.ones(4, 8), torch.zeros(4).long()) for _ in range(5)]
    >>> [loss is None for loss in losses]
    [True, True, False, False, False]

    ``model``      an ``nn.Sequential`` to be cut, or a list of modules: the stages as given.
    ``loss``       ``loss(output, target)``, one number, a mean over rows.
    ``optimizer``  called once per stage with its parameters; may return several optimizers.
    ``method``     an object from :mod:`offbeat.methods`, or its name.
    ``stages``     how many, cut where the counted cost of the first batch's forward balances;
                   ``cuts=[7]`` begins the next stage at child 7; ``ppv=(7,)`` ends one after the
                   7th conv or linear layer.
    ``scheduler``  ``scheduler(optimizer)``; stepped once per update.
    ``clip``       bound on the gradient norm: of the whole model when no stage lags, per stage
                   otherwise.
    ``seed``       key of all dropout; by default ``torch.initial_seed()``.
    ``autocast``   ``torch.bfloat16`` to run every forward in mixed precision.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        method: Method | str = Synchronous(),  # noqa: B008 -- a frozen value
        stages: int | None = None,
        cuts: Sequence[int] | None = None,
        ppv: Sequence[int] | None = None,
        scheduler: SchedulerFactory | None = None,
        clip: float | None = None,
        seed: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._phases = deque(_method(method).phases())
        self._cut = plan_cut(model, stages=stages, cuts=cuts, ppv=ppv)
        self._schedules = [phase.schedule(self._cut.stages) for phase, _ in self._phases]
        self._device = _device_of(self._cut.model)
        self._loss = _checked_loss(loss)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._clip = _checked_clip(clip)
        self._seed = torch.initial_seed() if seed is None else seed
        self._autocast = _checked_autocast(autocast)
        self._interleaving: Choose = updates_last
        self._transport = Memory()
        self._workers: list[Worker] = []
        self._awaited: deque[_Fed] = deque()
        self._next_batch = 0
        self._step_in_fill = 0
        self._steps_in_phase = 0
        self._stopped: str | None = None
        self.ledger = Ledger()
        """Every action with its weight version, start, end and loss."""
        if self._cut.places is not None and not self._needs_heads:
            self._build(None)

    # ---------------------------------------------------------------- what it is

    @property
    def model(self) -> nn.Module:
        """The unsplit model, holding the newest weights of every stage."""
        return self._cut.model

    @property
    def method(self) -> Method:
        """The method that runs now (under ``Phases``: the present phase)."""
        return self._phases[0][0]

    @property
    def stages(self) -> int:
        return self._cut.stages

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """The children at which stages begin; None until the first batch decides it."""
        return self._cut.places

    @property
    def lags(self) -> tuple[int, ...]:
        """Declared lag per stage in updates; ``ledger.lags(stage)`` has the measured ones."""
        return self.method.lags(self.stages)

    @property
    def _schedule(self) -> Schedule:
        return self._schedules[len(self._schedules) - len(self._phases)]

    def memory(self) -> tuple[StageMemory, ...]:
        """What each stage holds now: weight copies, graphs, bytes."""
        return tuple(worker.stage.memory() for worker in self._workers)

    # ---------------------------------------------------------------- training

    def step(self, x: Nest, y: Nest) -> Tensor | None:
        """Feeds one batch; after step n, stage k has forwarded 0..n and applied 0..n - lag.

        Returns the loss of the batch that stage 0 has just applied, None while the pipe fills.
        """
        self._refuse_if_stopped()
        self._enter_next_phase()
        self._check_batch(x, y)
        if not self._workers:
            self._build(x)
        with self._stopping_on_error(), torch.enable_grad():
            if self._step_in_fill == 0:
                self._begin_fill()
            self._feed(x, y)
            for worker in self._workers:
                worker.pending += self._schedule.row(worker.stage.index, self._step_in_fill)
            run_together(self._workers, self._interleaving)
        self._step_in_fill += 1
        self._steps_in_phase += 1
        late = len(self._awaited) - self._schedule.loss_delay
        return self._take_loss() if late > 0 else None

    def flush(self) -> list[Tensor]:
        """Drains the pipe: every started batch is applied. Returns the losses still owed."""
        self._refuse_if_stopped()
        with self._stopping_on_error(), torch.enable_grad():
            for worker in self._workers:
                worker.pending += self._schedule.drain(worker.stage.index, self._step_in_fill)
            run_together(self._workers, self._interleaving)
        self._step_in_fill = 0
        return [self._take_loss() for _ in range(len(self._awaited))]

    def _enter_next_phase(self) -> None:
        updates = self._phases[0][1]
        if updates is not None and self._steps_in_phase >= updates:
            self.flush()
            self._phases.popleft()
            self._steps_in_phase = 0

    def _begin_fill(self) -> None:
        schedule, method = self._schedule, self.method
        for worker in self._workers:
            index = worker.stage.index
            worker.stage.follow(
                method.rule,
                in_flight=schedule.in_flight(index),
                kept_versions=schedule.kept_versions(index),
                shrink=method.shrink,
                local_loss=schedule.local_losses,
            )
            worker.begin(schedule, self._next_batch)

    def _feed(self, x: Nest, y: Nest) -> None:
        parts = self._schedule.micro_batches
        inputs, targets = nest.split(x, parts), nest.split(y, parts)
        rows = [_rows(part) for part in inputs]
        shares = tuple(1.0 if parts == 1 else count / sum(rows) for count in rows)
        with_loss = range(self.stages) if self._schedule.local_losses else [self.stages - 1]
        for place, (given, wanted) in enumerate(zip(inputs, targets, strict=True)):
            batch = self._next_batch + place
            share = 1.0 if self.method.sums_gradients else shares[place]
            self._transport.send(Key("activation", 0, batch), given)
            for stage in with_loss:
                self._transport.send(Key("target", stage, batch), Target(wanted, share))
        self._awaited.append(_Fed(self._next_batch, shares))
        self._next_batch += parts

    def _take_loss(self) -> Tensor:
        fed = self._awaited.popleft()
        losses: list[Tensor] = [
            self._transport.receive(Key("loss", 0, fed.first_micro_batch + place))
            for place in range(len(fed.shares))
        ]
        if len(losses) == 1:
            return losses[0]
        return torch.stack(
            [loss * share for loss, share in zip(losses, fed.shares, strict=True)]
        ).sum()

    # ---------------------------------------------------------------- looking and saving

    def evaluate(self, loader: Iterable[tuple[Nest, Nest]]) -> Evaluation:
        """Loss and accuracy of the newest weights, undrained, in evaluation mode.

        Training goes on afterwards as if nothing had happened.
        """
        modes = {module: module.training for module in self.model.modules()}
        total, right, rows, classes = 0.0, 0, 0, True
        self.model.eval()
        try:
            with torch.no_grad():
                for x, y in loader:
                    output = self._predict(x)
                    count = _rows(x)
                    total += float(self._loss(output, y)) * count
                    rows += count
                    hits = _hits(output, y)
                    classes = classes and hits is not None
                    right += hits or 0
        finally:
            for module, mode in modes.items():
                module.training = mode
        if rows == 0:
            raise BatchError("evaluate() got an empty loader: give at least one (x, y).")
        return Evaluation(loss=total / rows, accuracy=right / rows if classes else None, rows=rows)

    def _predict(self, x: Nest) -> Nest:
        self._check_devices(x, None)
        if self._autocast is None:
            return self.model(x)
        with torch.autocast(self._device.type, dtype=self._autocast, cache_enabled=False):
            return self.model(x)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the newest weights and buffers under the names of the unsplit model."""
        state = self.model.state_dict()
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.detach().clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads weights of the unsplit model; also the way to go on after an error."""
        flying = max((worker.stage.in_flight for worker in self._workers), default=0)
        if self._stopped is None and flying:
            raise ConfigurationError(
                f"load_state_dict with {flying} batches in flight: their gradients belong to the"
                " old weights. Call flush() first."
            )
        self.model.load_state_dict(state)
        for worker in self._workers:
            worker.stage.discard()
            worker.pending.clear()
        self._transport.clear()
        self._awaited.clear()
        self._step_in_fill = 0
        self._stopped = None

    # ---------------------------------------------------------------- setting up

    @property
    def _needs_heads(self) -> bool:
        return self.stages > 1 and any(isinstance(phase, DGL) for phase, _ in self._phases)

    def _build(self, batch: Nest) -> None:
        """Makes stages and workers; some need the first batch to know how."""
        self._cut = self._cut.weighed(batch)
        modules = self._cut.modules()
        heads = self._make_heads(modules, batch)
        for index, (module, head) in enumerate(zip(modules, heads, strict=True)):
            has_loss = head is not None or index == len(modules) - 1
            stage = Stage(
                index,
                module,
                seed=self._seed,
                device=self._device,
                loss=self._loss if has_loss else None,
                head=head,
                autocast=self._autocast,
            )
            attach_optimizers(stage, self._optimizer, self._scheduler)
            self._workers.append(
                Worker(stage, self.stages, self._transport, self.ledger, self._clip)
            )

    def _make_heads(self, modules: Sequence[nn.Module], batch: Nest) -> list[nn.Module | None]:
        if not self._needs_heads:
            return [None] * len(modules)
        method = next(phase for phase, _ in self._phases if isinstance(phase, DGL))
        factory = method.head or default_head
        outputs = outputs_of(modules, batch)
        heads: list[nn.Module | None] = []
        for index, activation in enumerate(outputs[:-1]):
            # A state of its own, so that heads are the same however the stages are laid out.
            with seeded(seed_for(self._seed, stage=index, micro_batch=-1), self._device):
                head = factory(activation, outputs[-1])
            if not isinstance(head, nn.Module):
                raise ConfigurationError(
                    f"DGL(head=...) returned a {type(head).__name__}: it must return an nn.Module."
                )
            heads.append(head)
        return [*heads, None]

    # ---------------------------------------------------------------- refusing

    def _check_batch(self, x: Nest, y: Nest) -> None:
        self._check_devices(x, y)
        if torch.is_autocast_enabled(self._device.type):
            raise BatchError(
                "step() was called inside torch.autocast, whose weight cache would outlive an"
                " update. Leave the context and give Trainer(autocast=torch.bfloat16)."
            )
        parts = self._schedule.micro_batches
        rows = _rows(x)
        if rows < parts:
            raise BatchError(
                f"a batch of {rows} rows cannot make {parts} micro-batches for {self.method}: give"
                f" at least {parts} rows, or lower accumulate or micro_batches. The batch was not"
                " started."
            )
        if parts > 1:
            uneven = {t.size(0) if t.dim() else 0 for t in nest.tensors([x, y])} - {rows}
            if uneven:
                raise BatchError(
                    f"x has {rows} rows and another tensor of the batch {min(uneven)}: to split"
                    " a batch into micro-batches all tensors of x and y need the same first size."
                )

    def _check_devices(self, x: Nest, y: Nest) -> None:
        if not nest.tensors(x):
            raise BatchError(f"x is a {type(x).__name__} without a tensor in it: give tensors.")
        for tensor in nest.tensors([x, y]):
            if tensor.device != self._device:
                raise BatchError(
                    f"the batch is on {tensor.device}, the model on {self._device}: move one of"
                    f" them, for example x.to({str(self._device)!r})."
                )

    def _refuse_if_stopped(self) -> None:
        if self._stopped is not None:
            raise StoppedError(
                f"this run ended at an earlier error ({self._stopped}), with batches in flight that"
                " some stages may have applied and others not. Load a state with load_state_dict()"
                " to go on from there, or build a new Trainer."
            )

    def _stopping_on_error(self) -> "_StopOnError":
        return _StopOnError(self)


class _StopOnError:
    """Marks the trainer as stopped when anything, Ctrl-C included, ends a step half-way."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._trainer._stopped = (
                f"{kind.__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )


def _method(method: Method | str) -> Method:
    if isinstance(method, str):
        return method_named(method)
    if not isinstance(method, Method):
        raise ConfigurationError(
            f"method={method!r}: give an object such as StaleWeights(), or its name as a string."
        )
    return method


def _device_of(model: nn.Module) -> torch.device:
    places = {t.device for t in [*model.parameters(), *model.buffers()]}
    if len(places) > 1:
        raise ConfigurationError(
            f"the model lies on {', '.join(sorted(map(str, places)))}: in one process all stages"
            " share one device. Move it with model.to(...)."
        )
    return places.pop() if places else torch.device("cpu")


def _checked_loss(loss: Loss) -> Loss:
    if not callable(loss):
        raise ConfigurationError(f"loss={loss!r}: give a function loss(output, target).")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ConfigurationError(
            "the loss has parameters of its own, which no stage would train: put them into the last"
            " stage."
        )
    return loss


def _checked_clip(clip: float | None) -> float | None:
    if clip is not None and not clip > 0:
        raise ConfigurationError(f"clip={clip!r}: give a positive norm, or None for no clipping.")
    return clip


def _checked_autocast(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.bfloat16):
        raise ConfigurationError(
            f"autocast={dtype}: only torch.bfloat16 is supported; float16 needs loss scaling, which"
            " no stale pipeline can share."
        )
    return dtype


def _rows(batch: Nest) -> int:
    first = nest.tensors(batch)[0]
    return first.size(0) if first.dim() else 1


def _hits(output: Nest, target: Nest) -> int | None:
    """Rows whose largest output is at the target, if the target is a class number per row."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    whole = not target.is_floating_point() and not target.is_complex()
    if not whole or output.dim() != 2 or target.dim() != 1 or len(output) != len(target):
        return None
    return int((output.argmax(1) == target).sum())
