"""The trainer: the one object a user drives."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offbeat import nest
from offbeat.averaging import Averaging
from offbeat.averaging.averager import Averager
from offbeat.averaging.replicas import Replicas, mean_of, state_of
from offbeat.averaging.sharding import Sampler, shards_of
from offbeat.checkpoints import Checkpoints, Resumed
from offbeat.corrections import Correction, Monitor
from offbeat.corrections.corrector import Corrector, Fill
from offbeat.cutting.blocks import call, modes_kept
from offbeat.cutting.cut import Balancing, Cuts, Model, counted_cuts, order_of_norms, plan_cut
from offbeat.cutting.timing import measured_cuts
from offbeat.elastic.joining import CatchingUp, let_in
from offbeat.engines import checks
from offbeat.engines.evaluation import Evaluation, Score
from offbeat.engines.probe import cosines
from offbeat.engines.processes import Processes, processes_launched
from offbeat.engines.streams import Streams
from offbeat.engines.worker import Choose, Target, Worker, run_alone, run_together, updates_last
from offbeat.errors import BatchError, ConfigurationError, StoppedError, unknown
from offbeat.faults import Faults
from offbeat.guards import Guard, Guards, Updates
from offbeat.methods import DGL, Method, Synchronous
from offbeat.methods.auto import Auto, Plan
from offbeat.nest import Nest
from offbeat.optimizers import OptimizerFactory, SchedulerFactory
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings
from offbeat.schedules.schedule import Schedule
from offbeat.stages.build import Recipe
from offbeat.stages.lanes import marked
from offbeat.stages.memory import StageMemory
from offbeat.stages.stage import Loss, Stage, precision
from offbeat.transport.base import Key, Transport
from offbeat.transport.memory import Meeting

Engine = Literal["serial", "processes", "streams"]


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

    ``model``      an ``nn.Sequential`` or a model with a ``ModuleList`` of blocks, to be cut, or a
                   list of modules: the stages as given.
    ``loss``       ``loss(output, target)``, one number, a mean over rows.
    ``optimizer``  called once per stage with its parameters; may return several optimizers. "auto"
                   calls it once more before, to see what it makes.
    ``method``     an object from :mod:`offbeat.methods`, or its name; "auto" takes the least lag
                   that keeps all stages busy, accumulation and corrections with it, and says why.
    ``corrections``  what makes its staleness less harmful: objects from
                   :mod:`offbeat.corrections`, or their names; they find the lag by themselves.
                   None: what "auto" chooses, else none.
    ``monitor``    ``Monitor()`` reads how stale each stage is into ``readings``.
    ``stages``     how many, cut where the cost of the first batch balances (see ``balance``);
                   ``cuts=[7]`` begins the next stage at child 7, ``cuts=["transformer.h.6"]`` at
                   that block; ``ppv=(7,)`` ends one after the 7th conv or linear layer.
    ``balance``    "counted": by arithmetic, the same on every machine; "measured": by the time of
                   forward and backward on this device. :attr:`cuts` then says what was chosen.
    ``replicas``   how many copies of the model train on a part of each batch each.
    ``averaging``  how they are kept together: an object from :mod:`offbeat.averaging`; by default
                   ``AllReduce()``.
    ``scheduler``  ``scheduler(optimizer)``; stepped once per update.
    ``clip``       bound on the gradient norm: of the whole model when no stage lags, per stage
                   otherwise.
    ``seed``       key of all dropout; by default ``torch.initial_seed()``.
    ``autocast``   ``torch.bfloat16`` to run every forward in mixed precision.
    ``guards``     what to do about gradients that are not finite or too stale: see
                   :class:`offbeat.guards.Guards`; by default the first loss that is not finite is
                   named in the log.
    ``engine``     "serial": all stages in this process; "processes": one stage in each process that
                   torchrun started; by default whichever the script was started for. "streams":
                   all stages in this process, side by side on one GPU, as CUDA graphs.
    ``compile``    runs every stage through ``torch.compile``.
    ``timeout``    seconds a process waits for one message before the run ends with a report.
    ``when_replica_dies``  "stop" the run, or let the others "go on", with averages over who is left
                   (in processes that nobody ends when one of them dies: see docs/replicas.md).
    ``faults``     trouble by plan, for tests: see :class:`offbeat.faults.Faults`.

    With one stage per process every process runs the same script. ``step``, ``flush``,
    ``evaluate``, ``state_dict``, ``load_state_dict``, ``ledger`` and ``memory`` are called by
    all of them, and all get the same answer. R replicas of K stages are R x K processes; there
    ``step`` takes the part of the batch that this process's replica trains on, which
    :meth:`batches` and :meth:`sampler` provide, and returns the loss of that part, because asking
    the others would mean waiting for them.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        method: Method | Auto | str = Synchronous(),  # noqa: B008 -- a frozen value
        corrections: Sequence[Correction | str] | None = None,
        monitor: Monitor | None = None,
        stages: int | None = None,
        cuts: Cuts | None = None,
        ppv: Sequence[int] | None = None,
        balance: Literal["counted", "measured"] = "counted",
        replicas: int = 1,
        averaging: Averaging | str | None = None,
        scheduler: SchedulerFactory | None = None,
        clip: float | None = None,
        seed: int | None = None,
        autocast: torch.dtype | None = None,
        guards: Guards | None = None,
        engine: Engine | None = None,
        compile: bool = False,
        timeout: float = 300.0,
        when_replica_dies: Literal["stop", "go on"] = "stop",
        faults: Faults | None = None,
    ) -> None:
        self._cut = plan_cut(model, stages=stages, cuts=cuts, ppv=ppv)
        self._plan = checks.plan_of(method, self._cut.stages, optimizer, model)
        if self._plan is not None:
            method = self._plan.method
            if corrections is None:
                corrections = self._plan.corrections
            else:
                self._plan = self._plan.with_own(checks.checked_corrections(corrections))
        method = checks.checked_method(method)
        self._replicas = Replicas(replicas, checks.checked_replicas(replicas, averaging))
        self._phases = tuple(method.phases())
        self._phase = 0
        asked = not isinstance(model, nn.Module) or (stages, cuts, ppv) != (None,) * 3
        checks.warn_of_one_stage(method, self._cut.stages, asked)
        self._schedules = [phase.schedule(self._cut.stages) for phase, _ in self._phases]
        self._corrections = checks.checked_corrections(corrections or ())
        for (phase, _), schedule in zip(self._phases, self._schedules, strict=True):
            checks.check_corrections_fit(self._corrections, phase, schedule)
        checks.warn_of_idle_corrections(self._corrections, self._schedules)
        self._device = checks.device_of(self._cut.model)
        self._balance = balance
        self._clip = checks.checked_clip(clip)
        timeout = checks.checked_timeout(timeout)
        outlive = checks.outlives(when_replica_dies, self.averaging)
        self._guards = checks.checked_guards(guards, self._schedules, method)
        self._updates = Updates()
        self._faults = faults
        self._interleaving: Choose = updates_last
        self._workers: list[Worker] = []
        self._models = [self._cut.model]
        self._frozen: list[tuple[str, nn.Parameter]] = []
        """Parameters that were not trained when the stages were made."""
        self._copied: list[tuple[Any, Any, str]] = []
        """Parts of the user's model, their copies, and what both have alike in every step."""
        self._awaited: deque[range] = deque()
        self._owed: list[Tensor] = []
        self._next_batch = 0
        self._step = 0
        self._step_in_fill = 0
        self._steps_in_phase = 0
        self._evaluations = 0
        self._monitor = checks.checked_monitor(monitor)
        self._readings = Readings()
        self._stopped: str | None = None
        self._ledger = Ledger()
        self._first: Nest = None
        """The batch that decided how the stages were made, where one was needed."""
        self._when_built: Callable[[], None] | None = None
        self._checkpoints = Checkpoints(self, method)
        self._processes: Processes | None = None
        self._here = range(replicas)
        """The replicas of this process."""
        self._transports: Sequence[Transport] = Meeting(replicas).rows
        self._streams: Streams | None = None
        chosen = checks.chosen_engine(engine, processes_launched())
        checks.check_balance(balance, chosen, self._cut)
        checks.check_compile(compile, autocast, (phase for phase, _ in self._phases))
        if chosen == "streams":
            checks.check_streams(self._device, replicas, self.averaging, self._guards)
            self._streams = Streams(self._cut.stages, self._device, self._ledger)
            self._transports = [self._streams.transport]
        if chosen == "processes":
            self._processes = Processes(
                self._cut.stages, replicas, self._device, timeout, outlive=outlive
            )
            how = (method, self.averaging, self._corrections)
            seed = self._processes.agree_on_setup(self._cut.model, *how, seed)
            self._processes.agree({"the guards": (str(guards), "Give every process the same.")})
            self._here = range(self._processes.replica, self._processes.replica + 1)
            self._transports = [self._processes.transport]
        self._catching_up = CatchingUp(self)
        self._recipe = Recipe(
            loss=checks.checked_loss(loss),
            optimizer=checks.checked_optimizer(optimizer),
            scheduler=checks.checked_scheduler(scheduler),
            autocast=checks.checked_autocast(autocast),
            device=self._device,
            seed=torch.initial_seed() if seed is None else seed,
            compile=compile,
            lanes=None if self._streams is None else self._streams.lanes,
        )
        if self._plan is not None and self.rank == 0:
            print(self._plan)
        if not self._cut.needs_batch and not self._needs_heads:
            self._build(None)

    # ---------------------------------------------------------------- what it is

    def __repr__(self) -> str:
        lags = " ".join(map(str, self.lags))
        return f"Trainer({self.method!r}, stages={self.stages}, lag {lags}, step {self._step})"

    @property
    def model(self) -> nn.Module:
        """The unsplit model with the newest weights of the stages of this process (replica 0's)."""
        return self._cut.model

    @property
    def phases(self) -> tuple[tuple[Method, int | None], ...]:
        """The methods of this run and their updates: of all but ``Phases`` one, without end."""
        return self._phases

    @property
    def method(self) -> Method:
        """The method that runs now (under ``Phases``: the present phase)."""
        return self._phases[self._phase][0]

    @property
    def plan(self) -> Plan | None:
        """What ``method="auto"`` chose, and why; None if it was not asked."""
        return self._plan

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """What makes staleness less harmful, at the stages that lag."""
        return self._corrections

    @property
    def stages(self) -> int:
        return self._cut.stages

    @property
    def replicas(self) -> int:
        return self._replicas.count

    @property
    def replicas_here(self) -> int:
        """How many replicas train in this process."""
        return len(self._here)

    @property
    def device(self) -> torch.device:
        """Where the model is, and batches have to be."""
        return self._device

    @property
    def averaging(self) -> Averaging | None:
        """How replicas are kept together; None for a single one."""
        return self._replicas.averaging

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a grid, "replica" times "stage"; None in one process."""
        return None if self._processes is None else self._processes.mesh

    @property
    def mesh_size(self) -> int:
        """How many processes train together."""
        return 1 if self._processes is None else self._processes.size

    @property
    def learning_rate(self) -> float | None:
        """Of the first optimizer of this process; None before the stages are made."""
        for worker in self._workers:
            for optimizer in worker.stage.optimizers:
                return float(optimizer.param_groups[0]["lr"])
        return None

    @property
    def rank(self) -> int:
        """Which process this is; 0 when there is one."""
        return 0 if self._processes is None else self._processes.rank

    @property
    def behind(self) -> bool:
        """Whether this process takes the place of one that died and has not caught up yet.

        :meth:`batches` passes over what the others have had; everything else has to be left out.
        """
        return self._catching_up.behind

    @property
    def cuts(self) -> tuple[int, ...] | tuple[str, ...] | None:
        """Where stages begin: children, blocks or paths; None until the first batch decides it."""
        return self._cut.paths or self._cut.places

    @property
    def lags(self) -> tuple[int, ...]:
        """Declared lag per stage in updates; ``ledger.lags(stage)`` has the measured ones."""
        return self.method.lags(self.stages)

    @property
    def ledger(self) -> Ledger:
        """Every action of every stage with its weight version, start, end and loss.

        Read from all processes, so all must ask for it; ``own_ledger`` asks nobody.
        """
        own = self.own_ledger
        return own if self._processes is None else self._processes.merge(own)

    @property
    def own_ledger(self) -> Ledger:
        """The entries of this process alone, without asking the others."""
        if self._streams is not None:
            self._streams.ledger.settle()
        return self._ledger

    @property
    def readings(self) -> Readings:
        """What the monitor has read: staleness, quality of predictions, cosines of probes.

        Read from all processes, so all must ask for it.
        """
        if self._processes is None:
            return self._readings
        parts = self._processes.share_bytes(self._readings.to_bytes())
        return Readings.merged(map(Readings.from_bytes, parts))

    @property
    def updates(self) -> Updates:
        """Gradient norm, lag and outcome of every update, if there are ``guards``.

        Read from all processes, so all must ask for it.
        """
        if self._processes is None:
            return self._updates
        everyone = Updates()
        for data in self._processes.share_bytes(self._updates.to_bytes()):
            everyone.add_bytes(data)
        return everyone

    def memory(self) -> tuple[StageMemory, ...]:
        """What each stage of each replica holds now: weight copies, graphs, bytes."""
        own = [worker.stage.memory() for worker in self._workers]
        return tuple(own if self._processes is None else self._processes.gather_memory(own))

    @property
    def _schedule(self) -> Schedule:
        return self._schedules[self._phase]

    # ---------------------------------------------------------------- training

    def step(self, x: Nest, y: Nest) -> Tensor | None:
        """Feeds one batch; after step n, stage k has forwarded 0..n and applied 0..n - lag.

        Returns the loss of the batch that stage 0 has just applied, None while the pipe fills.
        """
        self._refuse_if_stopped()
        let_in(self)
        self._enter_next_phase()
        shards = self._shards(x, y)
        if self._plan is not None and self._step == 0:
            checks.warn_of_small_parts(shards[0], self._schedule.micro_batches, self._plan)
        self._refuse_thawed()
        for ours, theirs, name in self._copied:
            setattr(theirs, name, getattr(ours, name))
        with self._stopping_on_error(), torch.enable_grad():
            if self._processes is not None and self._step == 0:
                self._processes.refuse_equal_shards(x, y)
            if not self._workers:
                first, _ = shards[0]
                if self._cut.paths is not None:  # recorded for the shape that stages will see
                    first = nest.split(first, self._schedule.micro_batches)[0]
                self._build(self._processes.share_first(first) if self._processes else first)
            if self._step_in_fill == 0:
                self._begin_fill()
            self._feed(shards)
            for worker in self._workers:
                worker.step = self._step
                worker.pending += self._schedule.row(worker.stage.index, self._step_in_fill)
            self._run()
            self._read_monitors()
            self._step += 1
            self._step_in_fill += 1
            self._steps_in_phase += 1
            late = len(self._awaited) - self._schedule.loss_delay
            return self._take_loss() if late > 0 else None

    def check_batch(self, x: Nest, y: Nest) -> None:
        """Refuses a batch that :meth:`step` would refuse for its rows, without starting it."""
        self._shards(x, y)

    def flush(self) -> list[Tensor]:
        """Drains the pipe: every started batch is applied. Returns the losses still owed.

        Replicas then take the average of their weights, in place of any that is still under way.
        """
        self._refuse_if_stopped()
        with self._stopping_on_error(), torch.enable_grad():
            for worker in self._workers:
                worker.pending += self._schedule.drain(worker.stage.index, self._step_in_fill)
            self._run()
            self._step_in_fill = 0
            self._replicas.settle(self._workers)
            owed, self._owed = self._owed, []
            with self._joined():
                return owed + [self._take_loss() for _ in range(len(self._awaited))]

    def batches(self, loader: Iterable[tuple[Nest, Nest]]) -> Iterator[tuple[Nest, Nest]]:
        """The loader's batches where this process needs them, ``(None, None)`` where it does not.

        With one stage per process only the first and the last need data; the others do not even
        read it. Replicas in processes of their own get their part of each batch. All processes must
        have as many batches, which is checked before the first. In a process that takes the place
        of one that died they begin where the others are (see :attr:`behind`).
        """
        if self._processes is None:
            yield from loader
        else:
            local = any(schedule.local_losses for schedule in self._schedules)
            batches = self._processes.batches(loader, all_need_targets=local)
            yield from self._catching_up.rest_of(batches)

    def sampler(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> Sampler:
        """For ``DataLoader(data, batch_sampler=...)``: every process reads only its own rows.

        The same batches of ``batch_size`` rows over all replicas, in one process and in many.
        """
        alone = self._processes is None
        return Sampler(
            data,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            replicas=self.replicas,
            replica=None if alone else self._here[0],
        )

    def _joined(self) -> AbstractContextManager[None]:
        """Where weights are read or written between steps."""
        return nullcontext() if self._streams is None else self._streams.joined()

    def _run(self) -> None:
        if self._streams is not None:
            self._streams.run(self._workers)
        elif self._processes is None:
            run_together(self._workers, self._interleaving)
        else:
            for worker in self._workers:
                run_alone(worker)

    def _read_monitors(self) -> None:
        stages = [worker.stage for worker in self._workers]
        due = [stage for stage in stages if stage.corrector.due(stage.version)]
        with self._joined() if due else nullcontext():
            for stage in due:
                for what, value in stage.corrector.readings(stage.version):
                    self._readings.record(what, stage.index, stage.replica, stage.version, value)

    def _enter_next_phase(self) -> None:
        updates = self._phases[self._phase][1]
        if updates is not None and self._steps_in_phase >= updates:
            self._owed = self.flush()  # handed out by the user's own flush
            self._phase += 1
            self._steps_in_phase = 0

    def _begin_fill(self) -> None:
        with self._joined():
            for worker in self._workers:
                self._follow(worker, self._next_batch)

    def _follow(self, worker: Worker, first_batch: int, first_update: int | None = None) -> None:
        """Lets a worker and its stage run by the present method."""
        schedule, method = self._schedule, self.method
        stage = worker.stage
        fill = Fill(
            lag=schedule.lags[stage.index],
            micro_batches=schedule.micro_batches,
            first_batch=first_batch,
            first_update=stage.version if first_update is None else first_update,
        )
        stage.corrector.begin(fill, stage.optimizers)
        stage.follow(
            method.rule,
            in_flight=schedule.in_flight(stage.index),
            kept_versions=schedule.kept_versions(stage.index),
            shrink=method.shrink * stage.corrector.shrinkage,
            local_loss=schedule.local_losses,
        )
        worker.begin(schedule, first_batch, first_update)

    def _feed(self, shards: Sequence[tuple[Nest, Nest]]) -> None:
        """Hands every replica its part, in micro-batches, at the stages here that need it."""
        parts = self._schedule.micro_batches
        numbers = range(self._next_batch, self._next_batch + parts)
        for worker in self._workers:
            x, y = shards[worker.stage.replica - self._here[0]]
            checksum = None if self._processes is None or y is None else checks.checksum_of(y)
            index, transport = worker.stage.index, worker.transport
            if index == 0:
                for number, part in zip(numbers, nest.split(x, parts), strict=True):
                    transport.send(Key("activation", 0, number), (part, checksum))
            if index == self.stages - 1 or self._schedule.local_losses:
                for number, target in zip(numbers, self._targets(y, checksum), strict=True):
                    transport.send(Key("target", index, number), target)
        self._awaited.append(numbers)
        self._next_batch += parts

    def _targets(self, y: Nest, checksum: int | None) -> list[Target]:
        parts = self._schedule.micro_batches
        if parts == 1:
            return [Target(y, checksum=checksum)]
        pieces = nest.split(y, parts)
        rows = [checks.rows_of(piece) for piece in pieces]
        shares = [count / sum(rows) for count in rows]
        return [
            Target(piece, 1.0 if self.method.sums_gradients else share, share, checksum)
            for piece, share in zip(pieces, shares, strict=True)
        ]

    def _take_loss(self) -> Tensor:
        """The oldest loss not handed out yet; every stage is told, and all are told the same.

        Of several replicas in this process it is the mean.
        """
        numbers = self._awaited.popleft()
        losses: dict[int, Tensor] = {}
        for worker in self._workers:
            if worker.stage.index not in self._listeners:
                continue
            keys = [Key("loss", worker.stage.index, n, self.stages - 1) for n in numbers]
            terms = [worker.transport.receive(key) for key in keys]
            loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            losses[worker.stage.replica] = loss
        return mean_of(list(losses.values()))

    def stop_together(self, asked: bool, steps_per_s: float = 0.0) -> bool:
        """Whether to end the run after this step, once any process has ``asked`` to.

        Called after every step; ``steps_per_s`` is how fast this process goes. In one process it is
        ``asked`` itself. In several all stop after the same step, a few seconds later, so that
        they can still flush and save together.
        """
        if self._processes is None:
            return asked
        plan = None if self.averaging is None else self.averaging.plan()
        apart = 2 + 2 * max(self.lags) + (0 if plan is None else plan.every + plan.delay)
        return self._processes.stop_together(asked, self._step, steps_per_s, apart)

    # ---------------------------------------------------------------- looking and saving

    def evaluate(
        self, loader: Iterable[tuple[Nest, Nest]], *, of: Literal["average", "replica"] = "average"
    ) -> Evaluation:
        """Loss and accuracy of the newest weights, undrained, in evaluation mode.

        Of several replicas: their ``"average"``, or the first ``"replica"`` as it is. Training goes
        on afterwards as if nothing had happened.
        """
        self._refuse_if_stopped()
        checks.check_loader(loader)
        if of not in ("average", "replica"):
            raise unknown("of", of, ("average", "replica"))
        context = partial(precision, self._device, self._recipe.autocast)
        score = Score(self._recipe.loss, context)
        alone = self._processes is None
        with (
            # Nobody else waits for what an error in one process leaves undone.
            nullcontext() if alone else self._stopping_on_error(),
            self._joined(),
            modes_kept(self.model),
            torch.no_grad(),
        ):
            self.model.eval()
            states = self._replicas.states(self._workers, first=of == "replica")
            shown = [worker for worker in self._workers if worker.stage.replica == self._here[0]]
            for number, (x, y) in enumerate(loader):
                checks.check_devices([x, y], self._device)
                output = x if alone else None
                for worker in shown:
                    state = states[worker.stage.index]
                    if alone:
                        output = worker.stage.predict(output, state)
                    else:
                        output = worker.predict(number, x, state)
                if not shown:  # nothing is cut before the first batch has been weighed
                    with context():
                        output = call(self.model, x)
                if output is not None:
                    score.add(output, y)
            if self._processes is None or not shown:
                return score.result()
            self._evaluations += 1
            return self._processes.share_result(score, self._evaluations)

    def probe(self, x: Nest, y: Nest) -> dict[int, float]:
        """Per stage, the cosine of this batch's gradient at the stale and at the newest weights.

        The stale point is where the next gradient to be applied was computed. Training goes on as
        if nothing had happened; the values are also in ``readings``.
        """
        self._refuse_if_stopped()
        checks.check_probe(self._monitor, self._schedule)
        alone = self._processes is None
        stopping = nullcontext() if alone else self._stopping_on_error()
        with stopping, modes_kept(self.model), torch.enable_grad():
            self._evaluations += 1
            shown = [worker for worker in self._workers if worker.stage.replica == self._here[0]]
            found = dict(cosines(shown, self._recipe, self._evaluations, x, y))
            for worker in shown:
                stage = worker.stage
                if stage.index in found:
                    value = found[stage.index]
                    self._readings.record(
                        "cosine", stage.index, stage.replica, stage.version, value
                    )
            if self._processes is None:
                return dict(sorted(found.items()))
            row = self._processes.exchange_in_row("cosines", list(found.items()))
            return {stage: value for of_rank in row for stage, value in of_rank}

    def state_dict(self) -> dict[str, Any]:
        """A copy of the newest weights and buffers under the names of the unsplit model.

        Of several replicas it is their mean; nothing changes in any of them.
        """
        values: dict[int, Tensor] = {}
        with self._joined():
            states = self._replicas.states(self._workers)
            for stage, module in enumerate(self._cut.modules() if self._workers else []):
                entries = state_of(module)
                found = list(states.get(stage, entries).values())
                if self._processes is not None:
                    found = self._processes.share_tensors(found, stage)
                values |= {id(e): value for e, value in zip(entries.values(), found, strict=True)}
            state = self.model.state_dict(keep_vars=True)
            for name, entry in state.items():
                if isinstance(entry, Tensor):
                    state[name] = values.get(id(entry), entry).detach().clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads weights of the unsplit model; in one process also the way on after an error."""
        flying = max((worker.stage.in_flight for worker in self._workers), default=0)
        if self._stopped is None and flying:
            raise ConfigurationError(
                f"load_state_dict with {flying} batches in flight: their gradients belong to the"
                " old weights. Call flush() first."
            )
        with self._joined():
            for model in self._models:
                model.load_state_dict(state)
        self._discard()
        if self._workers:
            self._meet("weights loaded")  # who goes on early sends what others then clear away

    def _meet(self, name: str, value: Any = None) -> list[Any]:
        """Every process's value, by rank; nobody goes on before all are here."""
        if self._processes is None:
            return [value]
        with self._stopping_on_error():
            return self._processes.meet(name, value)

    def _discard(self) -> None:
        """Forgets whatever is in flight: weights come from elsewhere."""
        newest = max((worker.stage.version for worker in self._workers), default=0)
        for worker in self._workers:
            worker.stage.discard()
            worker.stage.version = newest  # an error may have left some behind
            worker.pending.clear()
            worker.transport.clear()
            worker.guard.forget()
            if worker.averager is not None:
                worker.averager.forget()
        self._awaited.clear()
        self._step_in_fill = 0
        self._stopped = None

    # ---------------------------------------------------------------- checkpoints

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        drain: bool = False,
        keep: int = 3,
        wait: bool = False,
        data: Any = None,
    ) -> Path:
        """Writes a checkpoint of this moment, between two steps, and lets training go on meanwhile.

        It holds all that is in flight, so that :meth:`resume` goes on with the same bits. With
        ``drain`` the pipe is drained first, and any cut, method or number of replicas can go on.
        ``keep`` older and newer ones stay in the folder, this one included; ``wait`` returns when
        it is on disk. ``data``: a loader with a ``state_dict``, or plain values. If it cannot be
        written, the next ``save`` or :meth:`finish_saving` says so. Returns its path.
        """
        self._refuse_if_stopped()
        return self._checkpoints.save(Path(folder), drain=drain, keep=keep, wait=wait, data=data)

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is on disk; raises if it could not be written."""
        self._checkpoints.wait()

    def resume(self, folder: str | os.PathLike[str], *, data: Any = None) -> Resumed:
        """Goes on from the newest complete checkpoint in a folder, if there is one.

        The trainer must have been built as the one that was saved. A damaged checkpoint is passed
        over with a warning. ``data``: a loader, set to the position that was saved with it. What is
        returned has the number of steps taken, 0 if the folder is empty, so that a script may
        always begin with it.
        """
        return self._checkpoints.resume(Path(folder), data)

    def _place(self) -> dict[str, Any]:
        """Where the run stands, beside what its stages hold."""
        return {
            "step": self._step,
            "next_batch": self._next_batch,
            "step_in_fill": self._step_in_fill,
            "phase": self._phase,
            "steps_in_phase": self._steps_in_phase,
            "awaited": [(numbers.start, numbers.stop) for numbers in self._awaited],
            "owed": list(self._owed),
        }

    def _go_to(self, place: dict[str, Any]) -> None:
        self._step, self._next_batch = place["step"], place["next_batch"]
        self._step_in_fill, self._phase = place["step_in_fill"], place["phase"]
        self._steps_in_phase = place["steps_in_phase"]
        self._awaited = deque(range(start, stop) for start, stop in place["awaited"])
        self._owed = place["owed"]

    # ---------------------------------------------------------------- setting up

    @property
    def _needs_heads(self) -> bool:
        return self.stages > 1 and any(isinstance(phase, DGL) for phase, _ in self._phases)

    def _build(self, batch: Nest) -> None:
        """Makes the workers of this process; some need the first batch to know how."""
        self._first = batch
        self._cut = self._cut.weighed(batch, self._balancing)
        plain = all(schedule.synchronous for schedule in self._schedules)
        checks.refuse_overlapping(
            self._cut,
            # There all stages can write the one memory, as plain training does.
            in_turn=plain and self._processes is None and self._streams is None,
            copied=len(self._here) > 1,
        )
        # Replica 0 is the user's own model; the others of this process are copies of it.
        cuts = [self._cut, *(self._cut.copied() for _ in self._here[1:])]
        self._models = [cut.model for cut in cuts]
        self._frozen = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        for copied in self._models[1:]:
            for parts, name in (
                (nn.Module.modules, "training"),
                (nn.Module.parameters, "requires_grad"),
            ):
                pairs = zip(parts(self.model), parts(copied), strict=True)
                self._copied += [(ours, theirs, name) for ours, theirs in pairs]
        for replica, cut, transport in zip(self._here, cuts, self._transports, strict=True):
            modules = cut.modules()
            heads = self._recipe.heads((phase for phase, _ in self._phases), modules, batch)
            here = range(self.stages) if self._processes is None else [self._processes.stage]
            names = {id(p): name for name, p in cut.model.named_parameters()}
            norm_order = order_of_norms(cut.model, modules)
            for stage in self._recipe.stages(modules, heads, here, replica):
                stage.norm_order = norm_order
                stage.names |= names
                guard = Guard(self._guards, stage, names, self._updates)
                self._workers.append(self._worker(stage, transport, guard))
                # Now, not when a later phase begins, corrections say what they do not fit.
                lags = [schedule.lags[stage.index] for schedule in self._schedules]
                stage.corrector.refuse_unfit(max(lags), stage.optimizers)
        if self._when_built is not None:
            self._when_built()

    @property
    def _balancing(self) -> Balancing:
        if self._balance == "counted":
            return counted_cuts
        return partial(
            measured_cuts,
            autocast=self._recipe.autocast,
            side_by_side=self._streams is not None,
        )

    def _worker(self, stage: Stage, transport: Transport, guard: Guard) -> Worker:
        stage.corrector = Corrector(
            self._corrections,
            stage=stage.index,
            stages=self.stages,
            parameters=[p for p in stage.parameters if p.requires_grad],
            monitor=self._monitor,
        )
        averager = None
        if self.averaging is not None:
            averager = Averager(self.averaging, stage, self.replicas, transport, self._ledger)
        return Worker(
            stage,
            self.stages,
            transport,
            self._ledger if self._streams is None else self._streams.ledger,
            clip=self._clip,
            faults=self._faults,
            averager=averager,
            guard=guard,
            listeners=self._listeners,
            clock=perf_counter if self._streams is None else marked,
        )

    @property
    def _listeners(self) -> Sequence[int]:
        """The stages that are told every loss: one per process is enough."""
        return [self.stages - 1] if self._processes is None else range(self.stages)

    # ---------------------------------------------------------------- refusing

    def _shards(self, x: Nest, y: Nest) -> list[tuple[Nest, Nest]]:
        """The batch, checked, as one part per replica of this process."""
        first = self._processes is None or self._processes.stage == 0
        if first and not nest.tensors(x):
            raise BatchError(f"x is a {type(x).__name__} without a tensor in it: give tensors.")
        checks.check_devices([x, y], self._device)
        checks.check_outside_autocast(self._device)
        here = len(self._here)
        shards = list(zip(shards_of(x, here), shards_of(y, here), strict=True))
        if nest.tensors([x, y]):
            checks.check_rows(
                list(shards[0]),
                self._schedule.micro_batches,
                self.method,
                by_auto=self._plan is not None,
            )
        if first and self._cut.paths is not None:
            parts = self._schedule.micro_batches
            checks.check_traced_shapes(
                [piece for x, _ in shards for piece in nest.split(x, parts)], self._first
            )
        last = self._processes is None or self._processes.stage == self.stages - 1
        if last and self._schedule.micro_batches > 1 and not nest.tensors(y):
            raise BatchError(
                f"y is a {type(y).__name__} without a tensor in it, and it is to be split into"
                f" {self._schedule.micro_batches} micro-batches: give a tensor with a row per row"
                " of x. The batch was not started."
            )
        return shards

    def _refuse_thawed(self) -> None:
        """Of the whole model, so that all processes refuse alike."""
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ConfigurationError(
                f"{thawed[0]} was frozen when this trainer began and has requires_grad now: what is"
                " trained is settled then. Keep the weights with state_dict(), and build a new"
                " Trainer with the model as it is to be trained. The batch was not started."
            )

    def _refuse_if_stopped(self) -> None:
        self._catching_up.refuse_if_behind()
        if self._stopped is not None:
            way_on = "Start the processes again, and resume() from a checkpoint."
            if self._processes is None:
                way_on = "Go on from a state with load_state_dict(), or build a new Trainer."
            raise StoppedError(
                f"this run ended at an earlier error ({self._stopped}), with batches in flight that"
                f" some stages may have applied and others not. {way_on}"
            )

    @contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        """Remembers that anything, Ctrl-C included, ended a step half-way; tells the others."""
        try:
            yield
        except BaseException as error:
            self._stopped = f"{type(error).__name__}: {error}".splitlines()[0]
            if self._processes is not None:
                self._processes.report(error)
            raise
