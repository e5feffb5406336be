"""DiLoCo: an outer optimizer steps along what the replicas learnt on average."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from offbeat.averaging.base import Periodic, Plan, require_positive, require_share
from offbeat.averaging.outer import Outer
from offbeat.averaging.outer_optimizer import stepped
from offbeat.errors import ConfigurationError
from offbeat.optimizers import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class OuterSettings(Periodic):
    """What the DiLoCos share: an optimizer over the average change of a round.

    It is ``torch.optim.SGD(params, outer_lr, outer_momentum, nesterov=nesterov)``, or what
    ``outer_optimizer(params)`` makes: any optimizer of torch's that needs gradients only, or a list
    of them.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    outer_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("outer_lr", self.outer_lr)
        require_share("outer_momentum", self.outer_momentum, "usually 0.9")
        if self.outer_optimizer is None:
            return
        if not callable(self.outer_optimizer):
            raise ConfigurationError(
                f"outer_optimizer={self.outer_optimizer!r}: give a function of parameters, such as"
                " lambda params: torch.optim.AdamW(params, lr=0.1)."
            )
        own = (self.outer_lr, self.outer_momentum, self.nesterov)
        if own != (OuterSettings.outer_lr, OuterSettings.outer_momentum, OuterSettings.nesterov):
            raise ConfigurationError(
                "outer_optimizer= makes the outer optimizer, and outer_lr, outer_momentum and"
                " nesterov are settings of the one it replaces: give its rate inside"
                " outer_optimizer and leave these out."
            )

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> Any:
        if self.outer_optimizer is not None:
            return self.outer_optimizer(parameters)
        momentum = self.outer_momentum
        # torch takes no Nesterov without momentum, where it would be the same.
        nesterov = self.nesterov and momentum > 0
        return torch.optim.SGD(parameters, self.outer_lr, momentum, nesterov=nesterov)


class Step(Outer):
    """X is one step of an outer optimizer from the last X, along the average change since."""

    sends = "changes"
    remembers: ClassVar[tuple[str, ...]] = ("_base", "_memory")

    def __init__(self, start: Tensor, _replicas: int, *, settings: OuterSettings) -> None:
        self._base = start
        self._memory: list[dict[str, Any]] = []
        """The states of the outer optimizers, once they have stepped."""
        self._settings = settings

    @property
    def copy(self) -> Tensor:
        return self._base

    def learn_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        self._shapes = shapes
        nothing = torch.zeros_like(self._base)
        stepped(self._settings.make_optimizer, [], shapes, nothing, nothing)  # refuses now

    def part(self, now: Tensor) -> Tensor:
        return self._base - now

    def target(self, mean: Tensor | None, _now: Tensor) -> Tensor | None:
        if mean is None:
            return None
        self._base = self._stepped(mean)
        return self._base

    def _stepped(self, change: Tensor) -> Tensor:
        make = self._settings.make_optimizer
        there, self._memory = stepped(make, self._memory, self._shapes, self._base, change)
        return there

    def settle(self, weights: Tensor) -> None:
        self._base = weights


@dataclass(frozen=True)
class DiLoCo(OuterSettings):
    """``every`` local updates, then ``X <- OuterOpt(X, X - mean of x)`` and all restart from X.

    Everybody waits for the average. Memory: a copy of the weights and what the outer optimizer
    keeps, one more by default. Reference: Douillard et al., "DiLoCo: Distributed Low-Communication
    Training of Language Models" (arXiv 2311.08105).
    """

    name = "diloco"
    title = "DiLoCo"
    reference = "Douillard et al. 2023, arXiv 2311.08105"

    def plan(self) -> Plan:
        return Plan(every=self.every, outer=partial(Step, settings=self))
