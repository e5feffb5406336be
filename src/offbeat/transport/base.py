"""How tensors travel between workers: keys and nests, nothing else."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

What = Literal[
    "activation",
    "gradient",
    "target",
    "norms",
    "loss",
    "evaluation",
    "result",
    "batch",
    "probe",
    "probe-gradient",
    "marker",
    # between replicas:
    "gradients",
    "weights",
    "export",
    "count",
    "obituary",
    "welcome",
    # of every link: that its sender lives, and the last message
    "beat",
    "goodbye",
]
_FROM_BEFORE = ("activation", "evaluation", "probe")
_FROM_BEHIND = ("gradient", "probe-gradient")
_AVERAGES = ("gradients", "weights", "export")


Members = Sequence[Collection[int]]
"""Per replica, the replicas whose parts it needs of an average."""


class Key(NamedTuple):
    """Names one message: what it is, which stage it is for and of which (micro-)batch."""

    what: What
    to: int
    batch: int
    source: int = 0
    """The sender, where several stages send the same thing."""

    def __str__(self) -> str:
        if self.what in _AVERAGES:
            return f"the average of {self.what} number {self.batch} at stage {self.to}"
        return f"the {self.what} of batch {self.batch} for stage {self.to}"

    @property
    def sender(self) -> str:
        """Who sends it, in words."""
        if self.what in (*_AVERAGES, "count"):
            return "the other replicas"
        if self.what in _FROM_BEFORE:
            return f"stage {self.to - 1}"
        return f"stage {self.to + 1 if self.what in _FROM_BEHIND else self.source}"


class Gathered(NamedTuple):
    """What all replicas contributed under one key."""

    parts: list[list[Tensor]]
    """Per replica, in order; a single entry where they were summed on the way."""
    sent_s: float
    arrived_s: float
    replicas: int
    """How many contributed."""
    senders: Sequence[int] | None = None
    """Which replicas the parts are from; None for all of them."""


class Transport(Protocol):
    """What a worker knows. Messages are sent once and received once; sending never waits."""

    def send(self, key: Key, message: Any) -> None: ...

    def arrived(self, key: Key) -> bool:
        """Whether :meth:`receive` would return at once."""

    def receive(self, key: Key) -> Any:
        """Takes the message out, waiting for it if need be."""

    def gather(
        self,
        key: Key,
        parts: Sequence[Tensor],
        *,
        summed: bool = False,
        members: Members | None = None,
    ) -> None:
        """Gives parts to all replicas of a stage; :class:`Gathered` arrives under the same key.

        The parts must not be written to afterwards. ``summed``: one sum is enough, in any order.
        ``members``: who needs whose parts. What else arrives has cost no message.
        """

    def waiting(self, stage: int) -> dict[Key, Any]:
        """The messages for a stage that have arrived and that nobody has taken yet."""

    def clear(self) -> None:
        """Forgets messages that nobody will take."""
