"""Overlap-Local-SGD: replicas are pulled towards an anchor that is averaged a round late."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_share
from offbeat.averaging.outer import Anchor, Outer
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
        return Plan(every=self.every, delay=self.every, keep=1 - self.pull, outer=self._outer)

    def _outer(self, _start: Tensor, _replicas: int) -> Outer:
        return Anchor(self.momentum)
