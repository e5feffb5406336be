"""A run between the user's verbs and the workers: phases, fills, batches fed, losses owed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.averaging.replicas import Replicas, Whose, mean_of, state_of
from offbeat.cutting.costs import count_operations, cut_by_count, cut_by_time
from offbeat.cutting.cut import Balance, Cut
from offbeat.engines import checks, feed
from offbeat.engines.assembly import make_stages
from offbeat.engines.base import Engine
from offbeat.engines.guests import look_at_first
from offbeat.engines.models import Models
from offbeat.engines.placement import counts_by
from offbeat.engines.position import Position
from offbeat.engines.setup import Setup
from offbeat.engines.worker import Worker
from offbeat.errors import ConfigurationError, StoppedError
from offbeat.methods import Method
from offbeat.nest import Nest
from offbeat.schedules.schedule import Schedule
from offbeat.stages.fill import Fill
from offbeat.stages.relay import Relay
from offbeat.stages.versions import weights_set_to
from offbeat.transport.base import Key


class Pipeline:
    """A model in stages, trained by a setup on an engine.

    Its public names are what checkpoints and returning replicas read and write.
    """

    def __init__(self, setup: Setup, cut: Cut, engine: Engine, seed: int) -> None:
        self.setup = setup
        self.cut = cut
        self.engine = engine
        self.seed = seed
        self.position = Position()
        self.replicas = Replicas(engine, setup.averaging)
        self.models = Models(cut)
        self.first: Nest = None
        """The batch that decided how the stages were made, where one was needed."""
        self.stopped: str | None = None
        """The error that ended the run, if one did."""
        self.when_built: Callable[[], None] | None = None
        """What waits for the stages to be made."""
        needs_heads = self.cut.stages > 1 and any(m.local_losses for m, _ in self._phases)
        if not (self.cut.needs_batch or needs_heads or engine.needs_costs):
            self.build(None)

    @property
    def _phases(self) -> Sequence[tuple[Method, int | None]]:
        return self.setup.course.phases

    @property
    def method(self) -> Method:
        """The method that runs now."""
        return self._phases[self.position.phase][0]

    @property
    def schedule(self) -> Schedule:
        return self.setup.course.schedules[self.position.phase]

    # ---------------------------------------------------------------- building

    @property
    def is_built(self) -> bool:
        """Whether the stages have been made: some need the first batch to know how."""
        return bool(self.engine.workers)

    def build(self, batch: Nest) -> None:
        """Makes the workers of this process."""
        with self.models.on_trial():
            self._make_workers(batch)
        self.models.read()
        if self.when_built is not None:
            self.when_built()

    def _make_workers(self, batch: Nest) -> None:
        self.first = batch
        self.cut = self.cut.decide(batch, self._balance)
        if self.setup.penalty is not None:
            checks.check_penalty(self.setup.penalty, self.cut)
        if any(method.local_losses for method, _ in self._phases):
            self._refuse_ties()
        if self.engine.needs_costs:
            costs: Sequence[float] = self.cut.costs or [1.0] * self.cut.stages
            if self.cut.costs is None and batch is not None:
                costs = count_operations(self.cut.modules, batch)
            self.engine.place(counts_by(costs, len(self.engine.placement.row)))
        placement = self.engine.placement
        self.cut.sharing().refuse_overlaps(
            in_turn=self.setup.is_synchronous and self.engine.runs_in_turn,
            copies=len(placement.replicas_here) > 1,
        )
        replicas = placement.replicas_here
        self.models.begin(self.cut, len(replicas), placement.stages_of(replicas[0]))
        for replica, cut in zip(replicas, self.models.cuts, strict=True):
            for stage in make_stages(self, cut, batch, replica):
                self.engine.workers.append(Worker(stage, self.setup, self.engine))
                # Now, not when a later phase begins, corrections say what they do not fit.
                lags = [schedule.lags[stage.index] for schedule in self.setup.course.schedules]
                stage.corrector.refuse_unfit(max(lags), stage.optimizers)

    def _refuse_ties(self) -> None:
        for stage, module in enumerate(self.cut.modules):
            if isinstance(module, Relay) and module.owned:
                raise ConfigurationError(
                    f"weight {module.owned[0]!r} of stage {stage} is used by later stages too, and"
                    f" with losses of their own ({self.setup.course.method}) no gradient comes back"
                    " from them. Give each stage a weight of its own: offbeat.untie(model); or"
                    " choose another method."
                )

    @property
    def _balance(self) -> Balance:
        if self.setup.balance == "counted":
            return cut_by_count
        side_by_side = self.engine.lanes is not None
        return partial(cut_by_time, autocast=self.setup.autocast, side_by_side=side_by_side)

    # ---------------------------------------------------------------- running

    def step(self, x: Nest, y: Nest) -> Tensor | None:
        """One batch through :attr:`schedule`; the loss that is due, None while the pipe fills."""
        x, y = nest.plain((x, y))
        if self.models.unread:
            self.models.refuse_unread()
        self._enter_next_phase()
        schedule, step = self.schedule, self.position.step_in_fill
        shards = feed.divide(self, schedule, x, y)
        if self.position.step == 0:
            feed.warn_of_small_parts(self, shards[0])
            look_at_first(self.cut.model, feed.first_part(shards[0].x))
        with self.following(), self.stopping_on_error(), torch.enable_grad():
            if self.position.step == 0:
                self.engine.refuse_equal_shards(x, y)
            if not self.is_built:
                self.build(self.engine.share_first(feed.first_part(shards[0].x)))
            self.models.hide()
            if step == 0:
                with self.engine.between_steps():
                    for worker in self.engine.workers:
                        self.follow(worker, self.position.next_batch)
            feed.hand_out(self, schedule, shards)
            for worker in self.engine.workers:
                worker.step = self.position.step
                worker.pending += schedule.row(worker.stage.index, step)
            self.engine.run()
            if self.setup.monitor is not None:
                self._read_monitors()
            self.position.advance()
            late = len(self.position.awaited) - schedule.loss_delay
            return _mean(self._take_losses()) if late > 0 else None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around whatever runs the model, so that it runs as the script has changed it since."""
        if changes := self.models.follow():
            for worker in self.engine.workers:
                worker.stage.look_again(changes)
        yield
        self.models.remember()

    def batches(self, loader: Iterable[tuple[Nest, Nest]]) -> Iterator[tuple[Nest, Nest]]:
        """What this process needs of a loader's batches."""
        local = any(schedule.local_losses for schedule in self.setup.course.schedules)
        return self.engine.batches(loader, all_need_targets=local)

    def stop_together(self, asked: bool, steps_per_s: float) -> bool:
        """Whether to end the run after this step, in all processes alike."""
        averaging = self.setup.averaging
        plan = None if averaging is None else averaging.plan()
        lag = max(self.method.lags(self.cut.stages))
        apart = 2 + 2 * lag + (0 if plan is None else plan.every + plan.delay)
        return self.engine.stop_together(asked, self.position.step, steps_per_s, apart)

    def flush(self) -> list[Tensor]:
        """Drains the pipe and returns the losses still owed; replicas take their average."""
        self.drain()
        owed, self.position.owed = self.position.owed, []
        with self.stopping_on_error(), self.engine.between_steps():
            return list(map(_mean, owed))

    def drain(self) -> None:
        """Flushes for a reason of our own: the user's next flush hands out the losses."""
        self.models.hide()
        with self.following(), self.stopping_on_error(), torch.enable_grad():
            for worker in self.engine.workers:
                step = self.position.step_in_fill
                worker.pending += self.schedule.drain(worker.stage.index, step)
            self.engine.run()
            self.position.step_in_fill = 0
            self.replicas.settle()
            with self.engine.between_steps():
                while self.position.awaited:
                    self.position.owed.append(self._take_losses())

    def _enter_next_phase(self) -> None:
        updates = self._phases[self.position.phase][1]
        if updates is not None and self.position.steps_in_phase >= updates:
            self.drain()
            self.position.phase += 1
            self.position.steps_in_phase = 0

    def follow(self, worker: Worker, first_batch: int, first_update: int | None = None) -> None:
        """Lets a worker and its stage run by the present method."""
        stage = worker.stage
        first_update = stage.version if first_update is None else first_update
        fill = Fill.of(self.method, self.schedule, stage.index, first_batch, first_update)
        worker.begin(fill)

    def _read_monitors(self) -> None:
        stages = [worker.stage for worker in self.engine.workers]
        due = [stage for stage in stages if stage.corrector.due(stage.version)]
        with self.engine.between_steps() if due else nullcontext():
            for stage in due:
                where = stage.index, stage.replica, stage.version
                for what, value in stage.corrector.readings(stage.version):
                    self.engine.readings.record(what, *where, value)

    def _take_losses(self) -> list[Tensor]:
        """The oldest not handed out yet of every replica here, of which every process is told."""
        numbers, last = self.position.awaited.popleft(), self.cut.stages - 1
        losses: list[Tensor] = []
        for worker in self.engine.workers:
            if worker.stage.index in self.engine.placement.listeners:
                keys = [Key("loss", worker.stage.index, n, last) for n in numbers]
                terms = [worker.transport.receive(key) for key in keys]
                losses.append(terms[0] if len(terms) == 1 else torch.stack(terms).sum())
        return losses

    # ---------------------------------------------------------------- weights

    def weights(self, of: Whose = "average") -> dict[str, Any]:
        """A copy of the newest, under the names of the unsplit model; ``of`` which replicas."""
        self.replicas.check(of)
        placement = self.engine.placement
        self.models.refuse_all_at_once("state_dict()", alone=placement.is_whole)
        values: dict[int, Tensor] = {}
        with (
            self.stopping_on_error(alone=False),
            self.engine.between_steps(),
            self.models.lent(),
        ):
            states = self.replicas.states(of)
            for stage, module in enumerate(self.cut.modules if self.is_built else []):
                entries = state_of(module)
                known = states.get(stage)
                own = [
                    self.models.room_for(entry) if known is None else known[name]
                    for name, entry in entries.items()
                ]
                everyone = self.engine.share_tensors(own, stage)
                values |= {id(e): v for e, v in zip(entries.values(), everyone, strict=True)}
            state = self.cut.model.state_dict(keep_vars=True)
            copies: dict[int, Tensor] = {}  # weights with two names have one copy, too
            for name, entry in state.items():
                if isinstance(entry, Tensor):
                    if id(entry) not in copies:
                        copies[id(entry)] = values.get(id(entry), entry).detach().clone()
                    state[name] = copies[id(entry)]
        return state

    def gather(self) -> nn.Module:
        """Makes the model of this process whole until the next step."""
        placement = self.engine.placement
        here = placement.stages_of(placement.replicas_here[0])
        self.models.refuse_all_at_once("gather()", alone=placement.is_whole)
        stages = self.cut.modules if self.is_built else ()
        tensors = [[*module.parameters(), *module.buffers()] for module in stages]
        with self.engine.between_steps(), self.models.made_whole(), torch.no_grad():
            self._make_room(tensors, here)
            for stage, own in enumerate(tensors):
                shared = self.engine.share_tensors(map(self.models.room_for, own), stage)
                for tensor, value in zip(own, shared, strict=True):
                    if stage not in here:
                        self.models.give(tensor, value)
        return self.cut.model

    def _make_room(self, tensors: Sequence[Sequence[Tensor]], here: Collection[int]) -> None:
        """For buffers that have another size since."""
        own = [(stage, [list(t.shape) for t in tensors[stage]]) for stage in here if tensors]
        everyone = self.engine.share_in_row("shapes", own)
        for stage, shapes in chain.from_iterable(everyone):
            for tensor, shape in zip(tensors[stage], shapes, strict=True):
                if list(tensor.shape) != shape:
                    self.models.give(tensor, tensor.new_empty(shape))

    def save_pretrained(self, folder: Path, of: Whose) -> None:
        """Lets rank 0 write the model, by its own method, with what :meth:`weights` returns."""
        model: Any = self.cut.model
        if not hasattr(model, "save_pretrained"):
            raise ConfigurationError(
                f"this {type(model).__name__} has no save_pretrained, which models of transformers"
                " have. Take state = trainer.state_dict() in all processes, and torch.save(state,"
                " ...) in one."
            )
        state = self.weights(of)
        if self.engine.rank > 0:
            return
        entries = model.state_dict(keep_vars=True)
        names = [name for name, entry in entries.items() if isinstance(entry, Tensor)]
        newest = weights_set_to([entries[n] for n in names], [state[n] for n in names])
        with self.engine.between_steps(), self.models.lent(), newest:
            model.save_pretrained(folder)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        workers = self.engine.workers
        flying = max((len(worker.stage.flights.in_air) for worker in workers), default=0)
        if self.stopped is None and flying:
            raise ConfigurationError(
                f"load_state_dict with {flying} batches in flight: their gradients belong to the"
                " old weights. Call flush() first."
            )
        with self.engine.between_steps():
            self.models.load(state)
        self.discard()
        if self.is_built:
            self.meet("weights loaded")  # who goes on early sends what others then clear away

    def discard(self) -> None:
        """Forgets whatever is in flight: weights come from elsewhere."""
        workers = self.engine.workers
        newest = max((worker.stage.version for worker in workers), default=0)
        for worker in workers:
            stage = worker.stage
            landed = {flight.batch for flight in stage.flights.landed}
            self.engine.own_ledger.take_back(stage.index, stage.replica, landed)
            stage.discard()
            worker.stage.version = newest  # an error may have left some behind
            worker.pending.clear()
            worker.transport.clear()
            worker.guard.forget()
            if worker.averager is not None:
                worker.averager.forget()
        self.position.awaited.clear()
        self.position.step_in_fill = 0
        self.stopped = None

    def meet(self, name: str, value: Any = None) -> list[Any]:
        """Every process's value, by rank; nobody goes on before all are here."""
        with self.stopping_on_error():
            return self.engine.meet(name, value)

    # ---------------------------------------------------------------- errors

    def refuse_if_stopped(self) -> None:
        if self.stopped is not None:
            raise StoppedError(
                f"this run ended at an earlier error ({self.stopped}), with batches in flight that"
                f" some stages may have applied and others not. {self.engine.way_on}"
            )

    @contextmanager
    def verb(self, name: str, *, trains: bool = False) -> Iterator[None]:
        """Around what all processes must be asked for alike.

        ``trains``: it cannot be done once an error has ended the run.
        """
        if trains:
            self.refuse_if_stopped()
        self.engine.enter(name)
        try:
            yield
        except BaseException:
            self.engine.take_back()
            raise

    @contextmanager
    def stopping_on_error(self, *, alone: bool = True) -> Iterator[None]:
        """Remembers that anything, Ctrl-C included, ended a step half-way; tells the others.

        ``alone``: also where no other process waits for what an error leaves undone.
        """
        try:
            yield
        except BaseException as error:
            if alone or self.engine.size > 1:
                self.stopped = f"{type(error).__name__}: {error}".splitlines()[0]
                self.engine.report(error)
            raise


def _mean(losses: Sequence[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else mean_of(losses)
