"""The whole state of a stage between two steps: plain values and tensors, as they are stored.

:meth:`Stage.snapshot <offbeat.stages.stage.Stage.snapshot>` takes it and ``restore`` puts it back;
checkpoints write it, and a replica that joins gets the mean of several.
"""

from typing import Any, TypedDict

from torch import Tensor

from offbeat.nest import Nest

STATE_FORMAT = 4
"""Of :class:`StageState` and what else an exact checkpoint holds. Whoever changes these raises it:
then exact checkpoints of older versions are refused in words."""


class WorkState(TypedDict):
    """An input, or a graph as the tensors that it saved."""

    given: Nest
    target: Nest
    scale: float
    leaves: Nest
    saved: list[Any]
    graph: bool
    """Whether there is one: under ``recompute`` only once the backward has begun."""


class FlightState(TypedDict):
    batch: int
    version: int
    lent: bool
    read: int | list[Tensor] | None
    """A place in the corrector's memory, or the weights themselves."""
    judged: list[Tensor] | None
    work: WorkState | None
    """None once its gradient is there."""


class CorrectorState(TypedDict):
    corrections: dict[str, Any]
    watch: list[Tensor]
    read: dict[str, Any] | None
    last_read: int | None


class StageState(TypedDict):
    version: int
    parameters: list[Tensor]
    buffers: list[Tensor]
    gradients: list[Tensor | None]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    old_versions: list[tuple[int, list[Tensor]]]
    flights: list[FlightState]
    """In the air, in the order in which they took off."""
    landed: list[FlightState]
    corrector: CorrectorState
    habits: dict[str, Any]
    """What the first batches have shown (:class:`offbeat.stages.habits.Habits`)."""
    peaks: list[int]
    """The most flights, and the most versions, that were alive at once."""
