"""What replicas head for: from an average to the point X that a merge pulls them to.

Every rule works on one fragment's weights as a single flat vector. It never writes into what it is
given, and keeps nothing of ``now``, whose memory is used again.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from offbeat.averaging.stateful import Stateful


class Outer(Stateful, ABC):
    """One replica's rule for one fragment; ``remembers`` names what a checkpoint must hold."""

    sends: ClassVar[Literal["weights", "changes"]] = "weights"
    """What a part is: numbers near the weights, or differences near zero."""
    sends_first: ClassVar[bool] = False
    """Whether the part is taken before the merge that falls on the same update."""

    @property
    def copy(self) -> Tensor | None:
        """The weights that a replica's rounds begin from, where a rule keeps them."""
        return None

    def learn_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Called once: what the vectors are made of, tensor after tensor."""

    def part(self, now: Tensor) -> Tensor:
        """What this replica contributes to an average that starts now."""
        return now

    @abstractmethod
    def target(self, mean: Tensor | None, now: Tensor) -> Tensor | None:
        """X, from the average that has arrived (None before the first); None for no merge."""

    def settle(self, weights: Tensor) -> None:
        """All replicas have just been set to these weights."""


class Mean(Outer):
    """X is the average of the weights."""

    def __init__(self, *_: object) -> None:
        pass

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        return mean
