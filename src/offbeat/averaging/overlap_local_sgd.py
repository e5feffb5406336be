"""Overlap-Local-SGD: replicas are pulled towards an anchor that is averaged a round late."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_share
from offbeat.averaging.outer import Outer
from offbeat.errors import ConfigurationError


@dataclass(frozen=True)
class OverlapLocalSGD(Periodic):
    """``x_i <- (1 - pull) x_i + pull z`` every round, z being one round old.

    Without ``momentum`` it is ``DaSGD(every, delay=every, keep=1 - pull)``. With it the anchor runs
    ahead: ``u <- momentum u + (z - x)`` and ``z - u`` is averaged. The authors' program also pulls
    towards the initial weights at the first boundary, where no average exists yet; we do not.
    Reference: Wang, Liang, Joshi, "Overlap Local-SGD", ICASSP 2020 (arXiv 2002.09539).
    """

    name = "overlap-local-sgd"
    title = "Overlap-Local-SGD"
    reference = "Wang et al. 2020, arXiv 2002.09539"

    pull: float = 0.6
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("pull", self.pull, "how far replicas move to the anchor")
        require_share("momentum", self.momentum, "of the anchor")
        if self.momentum == 1:
            raise ConfigurationError("momentum=1: the anchor would never settle; give less than 1.")

    def plan(self) -> Plan:
        outer = partial(Anchor, momentum=self.momentum)
        return Plan(every=self.every, delay=self.every, keep=1 - self.pull, outer=outer)


class Anchor(Outer):
    """The average of anchors that run ahead of the weights with a momentum of their own.

    ``u <- momentum u + (z - x)``, and ``z - u`` is sent: the paper's v is u over the learning rate,
    so the two agree while that is constant.
    """

    remembers = ("_z", "_u")

    def __init__(self, *_: object, momentum: float) -> None:
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
