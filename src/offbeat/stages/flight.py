"""Flights: the micro-batches of a stage between their forward and the update that applies them."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from offbeat.corrections.groups import Tensors
from offbeat.nest import Nest
from offbeat.rng import HostState
from offbeat.stages.versions import Graph, Stashed


@dataclass(kw_only=True)
class Work:
    """What a backward needs of its forward: the input, or a graph."""

    target: Nest = None
    scale: float = 1.0
    """Factor on the loss's gradient; at 0 nothing comes of the part, at any stage."""
    scale_at: Tensor | None = None
    """Where a recording reads it, which must not have the number built in."""
    penalized: bool = False
    """Whether its backward is the one of its batch that brings the penalty on weights."""
    given: Nest = None
    """The input, where the forward will be computed again."""
    given_as: list[int] | None = None
    """The version counters of that input; None if nobody looked."""
    drawn: HostState | None = None
    """What its forward drew from without a key, as the first to draw from Python or NumPy."""
    graph: Graph = field(default_factory=Graph)
    stashed: Stashed | None = None
    copies: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Weights its forward read, where the next update writes over those it saw."""
    hides: bool = False
    """Whether its backward may ask for any weight: then ``copies`` has all."""
    outdated: str | None = None
    """What a script has changed of the model since its graph was built, if anything."""
    leaves: Nest = None
    """The graph's input, as leaves of it: ``inputs`` in their nest."""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    penalty: Tensor | None = None


@dataclass(kw_only=True)
class Flight:
    """One micro-batch: stage, corrections and guard all ask here which weights it has read."""

    batch: int
    version: int
    """Of the weights that its forward read."""
    lent: bool = False
    """Whether its forward used weights with a storage of their own, which no update writes."""
    read: Tensors | None = None
    """What its forward read, where a correction asks for it later."""
    judged: tuple[Tensor, Tensor] | None = None
    """Of the weights predicted for it, and those it would have read, what the monitor compares."""
    work: Work | None = None
    """None once its gradient is there."""
    note: Any = None
    """What the stage's runner wants to find again at the backward."""


class Flights:
    """All of one stage: those in the air, and those whose gradient waits for the update."""

    def __init__(self) -> None:
        self.in_air: dict[int, Flight] = {}
        """By micro-batch, in the order in which they took off."""
        self.landed: list[Flight] = []
        """Their gradients are gathered, and the next update applies them."""
        self.peak = 0
        """The most that were in the air at once."""

    def take_off(self, flight: Flight) -> None:
        self.in_air[flight.batch] = flight
        self.peak = max(self.peak, len(self.in_air))

    def land(self, batch: int) -> None:
        """The gradient of a micro-batch is there: its graph, inputs and outputs can go."""
        flight = self.in_air.pop(batch)
        flight.work = flight.note = None
        self.landed.append(flight)

    def clear(self) -> None:
        self.in_air.clear()
        self.landed.clear()

    def works(self) -> list[Work]:
        """Of those in the air."""
        return [flight.work for flight in self.in_air.values() if flight.work is not None]

    def lag(self, version: int) -> int:
        """Of the update that ends ``version``: the largest of the micro-batches it applies."""
        return max((version - flight.version for flight in self.landed), default=0)

    def mean_lag(self, version: int) -> float:
        return fmean(version - flight.version for flight in self.landed)

    @property
    def oldest(self) -> Flight | None:
        """The one whose gradient is the next to be applied."""
        if self.landed:
            return self.landed[0]
        return self.in_air[min(self.in_air)] if self.in_air else None
