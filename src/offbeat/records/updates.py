"""The updates that guards saw: the norm of their gradients, their lag, what became of them."""

from typing import Literal, NamedTuple, get_args

from offbeat.records.columns import Columns

Outcome = Literal["applied", "skipped", "rolled back"]


class Update(NamedTuple):
    """One update as a guard saw it."""

    stage: int
    update: int
    lag: int
    """The most updates that any gradient in it is behind."""
    norm: float
    """Of all gradients of the stage together, before clipping."""
    outcome: Outcome
    replica: int = 0


class Updates(Columns[Update]):
    """All updates of a run."""

    entry = Update
    types = "iqqdbi"
    word, codes = "outcome", {outcome: code for code, outcome in enumerate(get_args(Outcome))}
    noun, name = "an update", "updates"

    def __repr__(self) -> str:
        return f"Updates({len(self)})"

    def norms(self, stage: int, replica: int = 0) -> dict[int, float]:
        """The gradient norm of every update of a stage."""
        return {u.update: u.norm for u in self.at(stage, replica)}

    def lags(self, stage: int, replica: int = 0) -> dict[int, int]:
        """The lag of every update of a stage."""
        return {u.update: u.lag for u in self.at(stage, replica)}

    def dropped(self, stage: int, replica: int = 0) -> dict[int, Outcome]:
        """The updates of a stage that were held back, and how."""
        return {u.update: u.outcome for u in self.at(stage, replica) if u.outcome != "applied"}
