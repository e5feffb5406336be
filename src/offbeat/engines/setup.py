"""What a run is set up with: every setting of a trainer that is not about where stages run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from offbeat.averaging import Averaging
from offbeat.corrections import Correction, Monitor
from offbeat.cutting.cut import Cut, Model
from offbeat.engines import checks
from offbeat.engines.shares import Weight
from offbeat.faults import Faults
from offbeat.guards import Guards
from offbeat.methods import Method
from offbeat.methods.auto import Auto, Plan
from offbeat.optimizers import OptimizerFactory, SchedulerFactory
from offbeat.schedules.schedule import Schedule
from offbeat.stages.network import Loss, Penalty


@dataclass(frozen=True)
class Course:
    """The methods of a run, one phase after the other, and what makes their lag less harmful."""

    method: Method
    """As it was given: that of all phases."""
    phases: tuple[tuple[Method, int | None], ...]
    """The methods and their updates: of all but ``Phases`` one, without end."""
    schedules: tuple[Schedule, ...]
    corrections: tuple[Correction, ...]
    plan: Plan | None
    """What "auto" chose, and why; None if it was not asked."""


def choose_course(
    method: Method | Auto | str,
    corrections: Sequence[Correction | str] | None,
    cut: Cut,
    optimizer: OptimizerFactory,
    model: Model,
) -> Course:
    """Asks "auto" where it was named, and refuses what does not fit together."""
    plan = checks.plan_of(method, cut.stages, optimizer, model)
    if plan is not None:
        method = plan.method
        if corrections is None:
            corrections = plan.corrections
        else:
            plan = plan.with_own(checks.checked_corrections(corrections))
    method = checks.checked_method(method)
    phases = tuple(method.phases())
    schedules = tuple(phase.schedule(cut.stages) for phase, _ in phases)
    found = checks.checked_corrections(() if corrections is None else corrections)
    for (phase, _), schedule in zip(phases, schedules, strict=True):
        checks.check_corrections_fit(found, phase, schedule)
    checks.warn_of_idle_corrections(found, schedules)
    return Course(method, phases, schedules, found, plan)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings as the user gave them, checked; nothing changes them during a run."""

    course: Course
    loss: Loss
    penalty: Penalty | None
    weight: Weight
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    clip: float | None
    autocast: torch.dtype | None
    compile: bool
    guards: Guards | None
    monitor: Monitor | None
    faults: Faults | None
    replicas: int
    averaging: Averaging | None
    device: torch.device
    balance: str

    @property
    def is_synchronous(self) -> bool:
        """Whether no stage lags in any phase."""
        return all(schedule.synchronous for schedule in self.course.schedules)

    @property
    def divides(self) -> bool:
        """Whether a batch is ever trained in several parts, by one replica or by several."""
        parts = max(schedule.micro_batches for schedule in self.course.schedules)
        return self.replicas * parts > 1

    @property
    def averages_gradients(self) -> bool:
        """Whether the gradients of several replicas are averaged before every update."""
        return self.replicas > 1 and self.averaging is not None and self.averaging.plan() is None

    @property
    def averages_with_some(self) -> bool:
        """Whether replicas average with some of the others only."""
        plan = None if self.averaging is None else self.averaging.plan()
        return plan is not None and plan.partners is not None


def describe(value: object) -> str:
    """A method and the like with its settings, in words that are the same in every process."""
    if isinstance(value, Method | Averaging | Correction):
        settings = (f"{f.name}={describe(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(settings)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    return str(getattr(value, "__qualname__", value))  # a function's address differs
