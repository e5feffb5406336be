"""What replicas head for: from an average to the point X that a merge pulls them to.

Every rule works on one fragment's weights as a single flat vector. It never writes into what it is
given, and keeps nothing of ``now``, whose memory is used again.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offbeat.averaging.stateful import Stateful


class Outer(Stateful, ABC):
    """One replica's rule for one fragment; ``remembers`` names what a checkpoint must hold."""

    sends: ClassVar[Literal["weights", "changes"]] = "weights"
    """What a part is: numbers near the weights, or differences near zero."""
    sends_first: ClassVar[bool] = False
    """Whether the part is taken before the merge that falls on the same update."""

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


class Anchor(Outer):
    """The average of anchors that run ahead of the weights with a momentum of their own.

    ``u <- momentum u + (z - x)``, and ``z - u`` is sent: Overlap-Local-SGD's v is u over the
    learning rate, so the two agree while that is constant.
    """

    remembers = ("_z", "_u")

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._z: Tensor | None = None
        self._u: Tensor | None = None

    def part(self, now: Tensor) -> Tensor:
        if self._z is None or self._momentum == 0:
            return now
        gap = self._z - now
        self._u = gap if self._u is None else self._momentum * self._u + gap
        return self._z - self._u

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        self._z = mean
        return mean

    def settle(self, _weights: Tensor) -> None:
        self._z = None


class Step(Outer):
    """X is one step of an outer optimizer from the last X, along the average change since."""

    sends = "changes"
    remembers: ClassVar[tuple[str, ...]] = ("_base", "_velocity")

    def __init__(self, start: Tensor, lr: float, momentum: float, nesterov: bool) -> None:
        self._base = start
        self._velocity = torch.zeros_like(start)
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov

    def part(self, now: Tensor) -> Tensor:
        return self._base - now

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        self._base = self._stepped(mean)
        return self._base

    def _stepped(self, change: Tensor) -> Tensor:
        self._velocity = self._momentum * self._velocity + change
        ahead = change + self._momentum * self._velocity if self._nesterov else self._velocity
        return self._base - self._lr * ahead

    def settle(self, weights: Tensor) -> None:
        self._base = weights


class EagerStep(Step):
    """The step uses a replica's own fresh change, and the others' from one round ago.

    A part is taken right before the step below, which still needs what was sent the last time.
    """

    sends_first = True
    remembers = (*Step.remembers, "_sent")

    def __init__(
        self, start: Tensor, replicas: int, lr: float, momentum: float, nesterov: bool
    ) -> None:
        super().__init__(start, lr, momentum, nesterov)
        self._replicas = replicas
        self._sent: Tensor | None = None

    def target(self, mean: Tensor | None, now: Tensor) -> Tensor | None:
        own = self._base - now
        change = own / self._replicas
        if mean is not None and self._sent is not None:
            change = change + (mean - self._sent / self._replicas)
        self._sent = own
        self._base = self._stepped(change)
        return self._base

    def settle(self, weights: Tensor) -> None:
        super().settle(weights)
        self._sent = None


class LateStep(Outer):
    """CO2: a step along the momentum of the gap to an average that is one round late."""

    sends_first = True
    remembers = ("_old", "_m")

    def __init__(
        self, start: Tensor, lr: float, momentum: float, penalty: float, clip: float | None
    ) -> None:
        self._old = start
        self._m = torch.zeros_like(start)
        self._lr, self._momentum, self._penalty, self._clip = lr, momentum, penalty, clip

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        self._m = self._momentum * self._m + (self._old - mean) / self._penalty
        if self._clip is not None:
            self._m = self._m.clamp(-self._clip, self._clip)
        self._old = self._old - self._lr * self._m
        return self._old

    def settle(self, weights: Tensor) -> None:
        self._old = weights
