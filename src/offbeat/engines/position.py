"""Where a run stands between two steps, beside what its stages hold."""

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor


@dataclass
class Position:
    """Counts of what has been done, and the losses that are still owed to the user."""

    step: int = 0
    next_batch: int = 0
    """The number of the next micro-batch."""
    step_in_fill: int = 0
    """Steps since the pipe began to fill; 0 while it is empty."""
    phase: int = 0
    steps_in_phase: int = 0
    awaited: deque[range] = field(default_factory=deque)
    """Micro-batches of the batches whose loss has not been handed out, oldest first."""
    owed: list[list[Tensor]] = field(default_factory=list)
    """Losses, of every replica here, of a drain that the user did not ask for, until their own."""

    def advance(self) -> None:
        self.step += 1
        self.step_in_fill += 1
        self.steps_in_phase += 1

    def add_batch(self, parts: int) -> range:
        """Numbers for the micro-batches of the next batch."""
        numbers = range(self.next_batch, self.next_batch + parts)
        self.awaited.append(numbers)
        self.next_batch += parts
        return numbers

    def state(self) -> dict[str, Any]:
        """As plain values and tensors, for a checkpoint."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        awaited = [(numbers.start, numbers.stop) for numbers in self.awaited]
        return state | {"awaited": awaited, "owed": list(self.owed)}

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state` gave."""
        for name, value in state.items():
            setattr(self, name, value)
        self.awaited = deque(range(start, stop) for start, stop in state["awaited"])
        # An earlier version kept their mean.
        self.owed = [[one] if isinstance(one, Tensor) else list(one) for one in state["owed"]]
