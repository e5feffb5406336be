"""What the first batches of a stage have shown about its modules."""

from dataclasses import dataclass


@dataclass
class Habits:
    """Known once somebody has looked; a checkpoint keeps them, so that nobody has to look again."""

    inputs_changed: bool | None = None
    """Whether the module writes into its input; None before its first call."""
    written: list[tuple[int, str]] | None = None
    """The buffers that a forward writes, as (module, name); None before the first."""
    draws: bool | None = None
    """Whether a forward draws from Python's or NumPy's generators; None before the first."""
    inspected: bool = False
    """Whether the first graph of this fill has been looked at, operation by operation."""
    hides: bool = False
    """Whether graphs keep weights, or run forwards again with them, where no hook sees it."""
    rebuildable: bool = False
    """Whether graphs are known to hold nothing that a snapshot would miss."""

    def forget(self) -> None:
        """What a module with other settings may do otherwise."""
        self.inputs_changed = self.written = None
        self.draws = self.draws or None
