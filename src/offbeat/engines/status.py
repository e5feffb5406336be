"""What a trainer is, and what it has recorded: all that a user reads and nothing that trains."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offbeat.averaging import Averaging
from offbeat.corrections import Correction
from offbeat.elastic.handover import CatchingUp
from offbeat.engines.base import Engine
from offbeat.engines.pipeline import Pipeline
from offbeat.guards import Updates
from offbeat.methods import Method
from offbeat.methods.auto import Plan
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings
from offbeat.stages.memory import StageMemory


class Status:
    """Read-only: the settings of a run, where it runs, and the records of what happened."""

    _engine: Engine
    _pipeline: Pipeline
    _catching_up: CatchingUp

    @contextmanager
    def _asked(self, name: str) -> Iterator[None]:
        """Around what is read from all processes."""
        with self._pipeline.verb(name), self._pipeline.stopping_on_error(alone=False):
            yield

    def __repr__(self) -> str:
        lags, step = " ".join(map(str, self.lags)), self._pipeline.position.step
        return f"Trainer({self.method!r}, stages={self.stages}, lag {lags}, step {step})"

    @property
    def model(self) -> nn.Module:
        """The unsplit model with the newest weights (replica 0's, where several are here).

        In several processes weights of stages that others train may be read once :meth:`gather` was
        called.
        """
        return self._pipeline.cut.model

    @property
    def phases(self) -> tuple[tuple[Method, int | None], ...]:
        """The methods of this run and their updates: of all but ``Phases`` one, without end."""
        return self._pipeline.setup.course.phases

    @property
    def method(self) -> Method:
        """The method that runs now (under ``Phases``: the present phase)."""
        return self._pipeline.method

    @property
    def plan(self) -> Plan | None:
        """What ``method="auto"`` chose, and why; None if it was not asked."""
        return self._pipeline.setup.course.plan

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """What makes staleness less harmful, at the stages that lag."""
        return self._pipeline.setup.course.corrections

    @property
    def stages(self) -> int:
        return self._pipeline.cut.stages

    @property
    def placement(self) -> tuple[int, ...]:
        """How many stages each process that holds a replica runs, in order."""
        return self._engine.placement.counts

    @property
    def replicas(self) -> int:
        return self._pipeline.setup.replicas

    @property
    def replicas_here(self) -> int:
        """How many of the replicas train in this process."""
        return len(self._engine.placement.replicas_here)

    @property
    def averaging(self) -> Averaging | None:
        """How replicas are kept together; None for a single one."""
        return self._pipeline.setup.averaging

    @property
    def device(self) -> torch.device:
        return self._pipeline.setup.device

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a grid, "replica" times "stage"; None in one process."""
        return self._engine.mesh

    @property
    def mesh_size(self) -> int:
        """How many processes train together."""
        return self._engine.size

    @property
    def learning_rate(self) -> float | None:
        """Of the first optimizer of this process; None before the stages are made."""
        optimizers = (o for worker in self._engine.workers for o in worker.stage.optimizers)
        return next((float(optimizer.param_groups[0]["lr"]) for optimizer in optimizers), None)

    @property
    def gradient_norm(self) -> float | None:
        """Of the last update's gradients before ``clip``; None where a stage lags, or none."""
        norms = [worker.stage.norm for worker in self._engine.workers]
        known = norms[0] if norms and not any(self.lags) and self._engine.lanes is None else None
        return None if known is None else float(known)

    @property
    def rank(self) -> int:
        """Which process this is; 0 when there is one."""
        return self._engine.rank

    @property
    def behind(self) -> bool:
        """Whether this process takes the place of one that died and has not caught up yet.

        :meth:`batches` passes over what the others have had; everything else has to be left out.
        """
        return self._catching_up.behind

    @property
    def cuts(self) -> tuple[int, ...] | tuple[str, ...] | None:
        """Where stages begin: children, blocks or paths; None until the first batch decides it."""
        return self._pipeline.cut.places

    @property
    def lags(self) -> tuple[int, ...]:
        """Declared lag per stage in updates; ``ledger.lags(stage)`` has the measured ones."""
        return self.method.lags(self.stages)

    @property
    def ledger(self) -> Ledger:
        """Every action of every stage with its weight version, start, end and loss."""
        with self._asked("ledger"):
            ledger = self._engine.merge_ledger()
        lags = [method.lags(self.stages) for method, _ in self.phases]
        ledger.declared = [max(of_stage) for of_stage in zip(*lags, strict=True)]
        return ledger

    @property
    def own_ledger(self) -> Ledger:
        """The entries of this process alone: it asks nobody."""
        return self._engine.own_ledger

    @property
    def readings(self) -> Readings:
        """What the monitor has read: staleness, quality of predictions, cosines of probes."""
        with self._asked("readings"):
            return self._engine.merge_readings()

    @property
    def updates(self) -> Updates:
        """Gradient norm, lag and outcome of every update, if there are ``guards``."""
        with self._asked("updates"):
            return self._engine.merge_updates()

    def memory(self) -> tuple[StageMemory, ...]:
        """What each stage of each replica holds now: weight copies, graphs, bytes."""
        with self._asked("memory()"):
            return tuple(self._engine.gather_memory())
