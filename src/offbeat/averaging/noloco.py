"""NoLoCo: a step of outer momentum towards the average of a pair that is drawn for each round."""

from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np
import torch
from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_positive, require_share
from offbeat.averaging.outer import Outer
from offbeat.methods.base import require_count


@dataclass(frozen=True, kw_only=True)
class NoLoCo(Periodic):
    """``d <- outer_momentum d + outer_lr (mean of the pair's x - X); X <- X + d; x <- X``.

    Nobody ever averages with all: pairs, or groups of ``size``, are drawn anew for every round as
    the authors' program draws them, and parts travel within a group only. The mean of x - X and the
    pull towards the pair's mean X have one factor, as in that program; the paper gives the pull one
    of its own. The program's routing of activations between replicas is not part of this. Replicas
    and their X differ. Where ``size`` does not divide the replicas, some groups are one smaller.
    Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for
    Large Models" (arXiv 2506.10911).

    >>> [sorted(NoLoCo(every=50).plan().members(round, 0, replicas=8)) for round in range(3)]
    [[0, 7], [0, 6], [0, 2]]
    """

    name = "noloco"
    title = "NoLoCo"
    reference = "Kolehmainen et al. 2025, arXiv 2506.10911"

    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("outer_lr", self.outer_lr)
        require_share("outer_momentum", self.outer_momentum, "below 1")
        require_count("size", self.size)

    def plan(self) -> Plan:
        outer = partial(PairStep, settings=self)
        return Plan(every=self.every, outer=outer, partners=partial(drawn, settings=self))


def drawn(round: int, replica: int, replicas: int, *, settings: NoLoCo) -> set[int]:
    """The group of a replica, drawn by the number of the update, as all replicas draw it."""
    update = (round + 1) * settings.every
    order = np.random.default_rng(update + 1).permutation(replicas).tolist()
    groups = ceil(replicas / settings.size)
    place = order.index(replica) % groups
    return set(order[place::groups])


class PairStep(Outer):
    """X goes on with momentum, towards what its group has on average."""

    remembers = ("_x", "_d")

    def __init__(self, start: Tensor, _replicas: int, *, settings: NoLoCo) -> None:
        self._x = start
        self._d = torch.zeros_like(start)
        self._settings = settings

    @property
    def copy(self) -> Tensor:
        return self._x

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        own = self._settings
        self._d = own.outer_momentum * self._d + own.outer_lr * (mean - self._x)
        self._x = self._x + self._d
        return self._x

    def settle(self, weights: Tensor) -> None:
        self._x = weights
