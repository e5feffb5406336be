"""What monitors read off a run: how stale it is, how good predictions are, how gradients agree."""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from offbeat.errors import unknown
from offbeat.records.columns import Columns

What = Literal["staleness", "prediction", "cosine"]
"""``staleness``: lr / (1 - momentum) x curvature x lag. ``prediction``: the error of predicted
weights as a share of the error without prediction. ``cosine``: of stale and fresh gradients."""
WHATS: tuple[What, ...] = get_args(What)


class Reading(NamedTuple):
    what: What
    stage: int
    replica: int
    version: int
    """Of the stage's weights when it was read."""
    value: float


class Readings(Columns[Reading]):
    """Everything that was read, in the order of reading."""

    entry = Reading
    types = "biiqd"
    word, codes = "what", {what: code for code, what in enumerate(WHATS)}
    noun, name = "a reading", "readings"

    def record(self, what: What, stage: int, replica: int, version: int, value: float) -> None:
        self.append(Reading(what, stage, replica, version, value))

    def __repr__(self) -> str:
        counts = Counter(reading.what for reading in self)
        return f"Readings({', '.join(f'{what}: {n}' for what, n in counts.items()) or 'none'})"

    def of(self, what: What, stage: int, replica: int = 0) -> dict[int, float]:
        """One kind of value of one stage, by version."""
        if what not in WHATS:
            raise unknown("reading", what, WHATS)
        return {r.version: r.value for r in self.at(stage, replica) if r.what == what}

    @classmethod
    def merged(cls, parts: Iterable["Readings"]) -> "Readings":
        """Of all processes, in the order of stages and versions."""
        everything = (reading for part in parts for reading in part)
        return cls(sorted(everything, key=lambda r: (WHATS.index(r.what), *r[1:4])))
