"""What a user says about the machines of a run: which process holds which stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import ConfigurationError

_SHORTEST_S = 1.0
"""A process that computes may be held up for a moment."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where stages run, and how long silence is borne; no choice changes a bit.

    ``placement``  how many stages each process that holds a replica runs, in order, as in (3, 5);
                   by default as many as their arithmetic on the first batch balances.
    ``silence``    seconds after which a process of which nothing is heard, not even that it lives,
                   counts as lost: it is frozen, or the network cuts it off. One that dies is
                   noticed within two seconds whatever this says.
    """

    placement: Sequence[int] | None = None
    silence: float = 30.0

    def __post_init__(self) -> None:
        silence = self.silence
        number = isinstance(silence, int | float) and not isinstance(silence, bool)
        if not number or not _SHORTEST_S <= silence < math.inf:
            raise ConfigurationError(
                f"silence={silence!r}: give the seconds after which a process that says nothing"
                f" counts as lost, {_SHORTEST_S:g} or more, as in silence=30."
            )
        counts = self.placement
        if counts is None:
            return
        whole = isinstance(counts, Sequence) and all(type(c) is int and c > 0 for c in counts)
        if not whole or not counts:
            raise ConfigurationError(
                f"placement={counts!r}: give how many stages each process that holds a replica"
                " runs, in order, as in placement=(3, 5)."
            )

    def counts(self, stages: int, places: int, replicas: int) -> Sequence[int] | None:
        """The placement that was given, if it is one for so many processes to a replica."""
        counts = self.placement
        if counts is None:
            return None
        if sum(counts) != stages:
            raise ConfigurationError(
                f"placement={counts!r} places {sum(counts)} stages, and the model has {stages}:"
                f" give numbers that add up to {stages}."
            )
        if len(counts) != places:
            raise ConfigurationError(
                f"placement={counts!r} is for {len(counts)} in a row of processes that hold a"
                f" replica, and here there are {places}. Start {len(counts) * replicas} processes"
                f" (torchrun --nproc-per-node {len(counts) * replicas} on one machine), or leave"
                " out the placement."
            )
        return counts


def checked_machines(machines: Machines | None) -> Machines:
    if machines is not None and not isinstance(machines, Machines):
        raise ConfigurationError(
            f"machines={machines!r}: give an object, as in"
            " machines=offbeat.Machines(placement=(3, 5))."
        )
    return machines or Machines()
