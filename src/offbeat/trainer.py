"""The trainer: the one object a user drives."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.averaging import Averaging
from offbeat.averaging.replicas import Whose
from offbeat.averaging.sharding import Sampler
from offbeat.checkpoints import Archive, Resumed, open_weights, shards
from offbeat.corrections import Correction, Monitor
from offbeat.cutting.cut import Cuts, Model
from offbeat.elastic.handover import CatchingUp, let_in
from offbeat.engines import checks, evaluation, feed, guests, probe
from offbeat.engines.choice import EngineName, start_engine
from offbeat.engines.evaluation import Evaluation, Metric
from offbeat.engines.machines import Machines
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.setup import Setup, choose_course
from offbeat.engines.shares import Count
from offbeat.engines.status import Status
from offbeat.faults import Faults
from offbeat.guards import Guards
from offbeat.methods import Method, Synchronous
from offbeat.methods.auto import Auto
from offbeat.nest import Nest
from offbeat.optimizers import OptimizerFactory, SchedulerFactory
from offbeat.stages.network import Loss, Penalty


class Trainer(Status):
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
    ``loss``       ``loss(output, target)``, one number, a mean over rows or what ``weight`` counts.
    ``weight``     what a part of a batch counts: ``weight(x, y)`` is a number, such as the tokens
                   that the loss is a mean over. None: rows, or where ``x["labels"]`` makes the
                   model compute its own loss, the labels other than -100; "rows": always rows;
                   "sum": the loss is a sum, and those of the parts are added as they are.
    ``optimizer``  called once per stage with its parameters, or with pairs (name, parameter) if it
                   calls its argument ``named``; may return several optimizers. "auto" calls it
                   once more before, to see what it makes.
    ``method``     an object from :mod:`offbeat.methods`, or its name; "auto" takes the least lag
                   that keeps all stages busy, accumulation and corrections with it, and says why.
    ``corrections``  what makes its staleness less harmful: objects from
                   :mod:`offbeat.corrections`, or names. None: what "auto" chooses, else none.
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
    ``engine``     "serial": all stages in this process; "processes": some in each process that
                   torchrun started; by default whichever the script was started for. "streams":
                   all stages in this process, side by side on one GPU, as CUDA graphs.
    ``compile``    runs every stage through ``torch.compile``.
    ``timeout``    seconds a process waits for one message before the run ends with a report.
    ``when_replica_dies``  "stop" the run, or let the others "go on", with averages over who is left
                   (in processes that nobody ends when one of them dies: see docs/replicas.md).
    ``machines``   which process holds which stages: see :class:`offbeat.Machines`.
    ``faults``     trouble by plan, for tests: see :class:`offbeat.faults.Faults`.
    ``penalty``    a loss on weights, a sum over them, computed stage by stage:
                   ``penalty=lambda named: 1e-4 * sum(p.square().sum() for name, p in named)``.

    Several processes run the same script, call the same verbs and read the same ``ledger``,
    ``readings`` and ``updates``; all get the same answer. Each holds stages of one replica, or
    whole replicas; there ``step`` takes the part of the batch of this process's replicas, which
    :meth:`batches` and :meth:`sampler` provide, and returns the loss of that part.
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
        weight: Count | Literal["rows", "sum"] | None = None,
        seed: int | None = None,
        autocast: torch.dtype | None = None,
        guards: Guards | None = None,
        engine: EngineName | None = None,
        compile: bool = False,
        timeout: float = 300.0,
        when_replica_dies: Literal["stop", "go on"] = "stop",
        machines: Machines | None = None,
        faults: Faults | None = None,
        penalty: Penalty | None = None,
    ) -> None:
        cut = guests.plan(model, stages=stages, cuts=cuts, ppv=ppv)
        course = choose_course(method, corrections, cut, optimizer, model)
        if isinstance(model, nn.Module) and stages is None and cuts is None and ppv is None:
            checks.warn_of_one_stage(course.method, cut.stages)
        checks.check_factories(optimizer, scheduler)
        checks.check_trainable(cut.model)
        setup = Setup(
            course=course,
            loss=checks.checked_loss(loss),
            penalty=checks.checked_penalty(penalty),
            weight=checks.checked_weight(weight, cut.model),
            optimizer=optimizer,
            scheduler=scheduler,
            clip=checks.checked_clip(clip),
            autocast=checks.checked_autocast(autocast),
            compile=checks.checked_switch("compile", compile),
            guards=checks.checked_guards(guards, course.schedules, course.method),
            monitor=checks.checked_monitor(monitor),
            faults=checks.checked_faults(faults),
            replicas=replicas,
            averaging=checks.checked_replicas(replicas, averaging),
            device=checks.device_of(cut.model),
            balance=balance,
        )
        self._engine = start_engine(engine, cut, setup, timeout, when_replica_dies, machines)
        seed = self._engine.agree(setup, cut, checks.checked_seed(seed))
        if course.plan is not None and self.rank == 0:
            course.plan.announce()
        self._pipeline = Pipeline(setup, cut, self._engine, seed)
        self._archive = Archive(self._pipeline)
        self._catching_up = CatchingUp(self._pipeline)

    # ---------------------------------------------------------------- training

    def step(self, x: Nest, y: Nest = None) -> Tensor | None:
        """Feeds one batch; after step n, stage k has forwarded 0..n and applied 0..n - its depth.

        A mapping of the model's arguments, such as a BatchEncoding, may be the whole batch.

        Its depth is how many batches it keeps in flight (:meth:`Schedule.depth`). Returns the loss
        of the batch that stage 0 has just applied, None while the pipe fills.
        """
        with self._verb("step()"):
            let_in(self._pipeline)
            return self._pipeline.step(x, y)

    def flush(self) -> list[Tensor]:
        """Drains the pipe: every started batch is applied. Returns the losses still owed.

        Replicas then take the average of their weights, in place of any that is still under way.
        """
        with self._verb("flush()"):
            return self._pipeline.flush()

    def check_batch(self, x: Nest, y: Nest = None) -> None:
        """Refuses a batch that :meth:`step` would refuse, without starting it."""
        feed.divide(self._pipeline, self._pipeline.schedule, nest.plain(x), nest.plain(y))

    def batches(self, loader: Iterable[Nest]) -> Iterator[tuple[Nest, Nest]]:
        """The loader's batches where this process needs them, ``(None, None)`` where it does not.

        Of several processes only those of the first and the last stage read data. Replicas in
        processes of their own get their part of each batch. All processes must have as many
        batches, which is checked before the first. In a process that takes the place of one that
        died they begin where the others are (see :attr:`behind`).
        """
        self._engine.enter("batches()")
        yield from self._catching_up.rest_of(self._pipeline.batches(loader))

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
        return Sampler(
            data,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            replicas=self.replicas,
            parts=self._engine.placement.rows,
            part=self._engine.placement.share,
        )

    def stop_together(self, asked: bool, steps_per_s: float = 0.0) -> bool:
        """Whether to end the run after this step, once any process has ``asked`` to.

        Called after every step; ``steps_per_s`` is how fast this process goes. Several processes
        stop after the same step, a few seconds later, so that they can still flush and save.
        """
        return self._pipeline.stop_together(asked, steps_per_s)

    # ---------------------------------------------------------------- looking and saving

    def evaluate(
        self,
        loader: Iterable[Nest],
        *,
        metrics: Mapping[str, Metric] | None = None,
        of: Whose = "average",
    ) -> Evaluation:
        """Loss and accuracy of the newest weights, undrained; ``of`` as in :meth:`state_dict`.

        ``metrics`` are functions ``metric(output, target)`` of all batches together, by name; where
        a batch is a mapping, the target is its ``labels``.
        """
        with self._verb("evaluate()"):
            found = evaluation.checked_metrics(metrics)
            return evaluation.evaluate(self._pipeline, loader, found, of=of)

    def predict(self, loader: Iterable[Nest], *, of: Whose = "average") -> list[Nest]:
        """The model's outputs for every batch by the newest weights, undrained, in all processes.

        The loader's batches may be (x, y), x alone if it is a tensor, or mappings. Outputs are
        tensors in tuples, lists and dicts.
        """
        with self._verb("predict()"):
            return evaluation.predict(self._pipeline, loader, of=of)

    @contextmanager
    def predictor(self) -> Iterator[Callable[[Nest], Nest]]:
        """Within, ``predict(x)`` gives one output; all processes call alike, and nothing trains."""
        with self._verb("predictor()"), evaluation.passes(self._pipeline) as over:
            yield partial(evaluation.predict_one, over)

    def probe(self, x: Nest, y: Nest = None) -> dict[int, float]:
        """Per stage, the cosine of this batch's gradient at the stale and at the newest weights.

        The stale point is where the next gradient to be applied was computed. The values are also
        in ``readings``.
        """
        with self._verb("probe()"):
            checks.check_probe(self._pipeline.setup.monitor, self._pipeline.schedule)
            return probe.probe(self._pipeline, nest.plain(x), nest.plain(y))

    def state_dict(self, *, of: Whose = "average") -> dict[str, Any]:
        """A copy of the newest weights and buffers of the unsplit model.

        ``of`` replicas their "average"; the first "replica" that there is, or one by its number;
        or the "global" copy that rounds of DiLoCo and its like begin from.
        """
        with self._pipeline.verb("state_dict()"):
            return self._pipeline.weights(of)

    def load_state_dict(self, state: dict[str, Any] | str | os.PathLike[str]) -> None:
        """Loads weights of the unsplit model; in one process also the way on after an error.

        ``state`` may be a file of safetensors, or a folder that ``save_pretrained`` wrote: of a
        model that was built on ``torch.device("meta")`` each process reads those of its own stages.
        """
        found = open_weights(state) if isinstance(state, str | os.PathLike) else state
        with self._pipeline.verb("load_state_dict()"):
            self._pipeline.load_weights(found)

    def gather(self) -> nn.Module:
        """Makes :attr:`model` whole until the next step or flush, and returns it.

        All processes call it. Only then may weights of stages that others train be read there.
        """
        with self._verb("gather()"):
            return self._pipeline.gather()

    def save_pretrained(self, folder: str | os.PathLike[str], *, of: Whose = "average") -> None:
        """Lets rank 0 write a model of transformers by its own method; all processes call it.

        What it writes is what :meth:`state_dict` returns. Of a model that was built on
        ``torch.device("meta")``, of whichever kind, each process writes the stages that it holds.
        """
        spread = self._pipeline.models.is_spread and not self._engine.placement.is_whole
        with self._pipeline.verb("save_pretrained()"):
            if spread:
                self._pipeline.refuse_if_stopped()
                shards.save(self._pipeline, Path(folder))
            else:
                self._pipeline.save_pretrained(Path(folder), of)

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
        The folder keeps ``keep`` of them; ``wait`` returns when this one is on disk. ``data``: a
        loader with a ``state_dict``, or plain values. If it cannot be written, the next ``save`` or
        :meth:`finish_saving` says so. Returns its path.
        """
        with self._verb("save()"):
            return self._archive.save(
                checks.checked_folder(folder), drain=drain, keep=keep, wait=wait, data=data
            )

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is on disk; raises if it could not be written."""
        self._archive.wait()

    def resume(self, folder: str | os.PathLike[str], *, data: Any = None) -> Resumed:
        """Goes on from the newest complete checkpoint in a folder, if there is one.

        The trainer must have been built as the one that was saved. A damaged checkpoint is passed
        over with a warning. ``data``: a loader, set to the position that was saved with it. The
        result has the number of steps taken, 0 if the folder is empty: a script may begin with it.
        """
        with self._pipeline.verb("resume()"):
            return self._archive.resume(checks.checked_folder(folder), data)

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        self._catching_up.refuse_if_behind()
        with self._pipeline.verb(name, trains=True):
            yield
