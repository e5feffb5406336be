"""Where a run stands, and who looks at it while it goes on."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from offbeat.engines.evaluation import Evaluation
from offbeat.stages.memory import StageMemory
from offbeat.trainer import Trainer

METRICS_EVERY = 10
"""Steps over which losses are averaged."""


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
