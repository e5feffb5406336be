"""Weight prediction: go forward with the weights that the gradient will meet."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.corrections.base import Correction, Hook, Moment, Numbers, Surroundings, require_number
from offbeat.corrections.fit import HorizonFit
from offbeat.corrections.groups import Group, Tensors
from offbeat.corrections.seen import refuse_holes
from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.base import Rule

Direction = Literal["optimizer", "difference"]
Horizon = Literal["lag", "geometric", "fitted"]


@dataclass(frozen=True)
class Predict(Correction):
    """The forward reads ``w + T d``: where T more updates in direction d would lead.

    ``direction="optimizer"``: d is the step that the optimizer's momentum alone would take:
    ``-lr v`` for SGD (SpecTrain, LWPv), ``-lr m^ / (sqrt(v^) + eps)`` for Adam and AdamW (XPipe,
    PipeOptim; no decay term), and the last update for Muon and any other optimizer.
    ``"difference"``: d is the last update, ``w[t] - w[t-1]``, for every optimizer (LWPw).

    ``horizon``: T is the ``"lag"`` D of the micro-batch; ``"geometric"``, ``b (1-b^D) / (1-b)``, b
    being the momentum: how far the momentum of now will carry the weights in D updates;
    ``"fitted"``, the T that predicted best so far (least squares, between 0 and D); or a number.

    Under ``stash`` the backward sees the predicted weights too; under ``current`` and ``recompute``
    the newest ones, which are what the prediction aims at. Evaluation never sees a prediction.

    References: Chen et al. 2018 (SpecTrain, arXiv 1809.02839); Kosson et al. 2021 (LWP, arXiv
    2003.11666); geometric horizon: FTPipe, Eliad et al. 2021.

    >>> Predict().horizon
    'geometric'
    """

    name = "predict"
    title = "Weight prediction"
    acts_on = "forward weights"
    memory = "1 per version; difference: 2 more"
    reference = "Kosson et al. 2021, arXiv 2003.11666"

    direction: Direction = "optimizer"
    horizon: Horizon | float = "geometric"

    def __post_init__(self) -> None:
        if self.direction not in ("optimizer", "difference"):
            raise unknown("direction", self.direction, ("optimizer", "difference"))
        if not isinstance(self.horizon, str):
            require_number("Predict", "horizon", self.horizon, above=0)
        elif self.horizon not in ("lag", "geometric", "fitted"):
            raise unknown("horizon", self.horizon, ("lag", "geometric", "fitted"))

    def check_rule(self, rule: Rule, *, reads_old_versions: bool) -> None:
        if reads_old_versions:
            raise ConfigurationError(
                "forwards read an older version on purpose, so that all micro-batches of a step"
                " agree, and predict would give them another. Use extrapolate in its place, or"
                " predict with a method that reads the newest version, as PipeDream(accumulate=M)."
            )

    def hook(self, around: Surroundings) -> "Prediction":
        refuse_holes(self.name, around)
        if self.horizon == "geometric":
            for group in around.groups:
                if group.momentum is None:
                    raise ConfigurationError(
                        f"predict:horizon=geometric needs a momentum, and {group.optimizer_name} of"
                        f" stage {around.stage} has no such setting. Use horizon=lag or fitted."
                    )
        return Prediction(self, around)


class Prediction(Hook):
    repeats = True

    def __init__(self, settings: Predict, around: Surroundings) -> None:
        self._settings = settings
        self._groups = around.groups
        self._places = {id(p): place for place, p in enumerate(around.parameters)}
        self._parameters = around.parameters
        by_optimizer = settings.direction == "optimizer"
        self._by_difference = [not (by_optimizer and g.has_direction) for g in self._groups]
        self._last: Tensors = ()
        """The last update of every parameter, where any group goes by it."""
        if any(self._by_difference):
            self._last = tuple(torch.zeros_like(p) for p in around.parameters)
        self._moved = torch.zeros(len(around.parameters), dtype=torch.bool)  # on the host
        """Which parameters the last update had a gradient for: only they are on their way."""
        self.needs_before = any(self._by_difference)
        self._fit = None
        if settings.horizon == "fitted":
            self._fit = HorizonFit(around.parameters, around.lag)

    def numbers(self, moment: Moment) -> Numbers:
        """Per group the factor on its direction; with a fitted horizon, the lag behind them."""
        if moment.lag == 0 or moment.update == 0:
            return ()
        fitted = self._fit is not None
        horizons = [1.0 if fitted else self._horizon(g, moment.lag) for g in self._groups]
        factors = [
            horizon if by_difference else -group.lr * horizon
            for group, by_difference, horizon in zip(
                self._groups, self._by_difference, horizons, strict=True
            )
        ]
        return [*factors, float(moment.lag)] if fitted else factors

    def _horizon(self, group: Group, lag: int) -> float:
        if not isinstance(self._settings.horizon, str):
            return self._settings.horizon
        if self._settings.horizon == "lag":
            return float(lag)
        momentum = group.momentum
        assert momentum is not None
        return sum(momentum**i for i in range(1, lag + 1))

    def forward_weights(self, numbers: Numbers) -> Tensors | None:
        if not numbers:
            return None
        moves = self._displacements(numbers)
        if self._fit is not None:
            moves = torch._foreach_mul(moves, self._fit.horizon(float(numbers[-1])))
        return torch._foreach_add([p.detach() for p in self._parameters], moves)

    def before_step(self, numbers: Numbers) -> None:
        self._moved.copy_(torch.tensor([p.grad is not None for p in self._parameters]))

    def _displacements(self, factors: Numbers) -> Tensors:
        """Per parameter ``factor * direction``; zero where the last update did not move it."""
        moved = self._moved.tolist()
        moves: list[Tensor | None] = [None] * len(self._parameters)
        for place, group in enumerate(self._groups):
            if self._by_difference[place]:
                moving = group.parameters
                directions = tuple(self._last[self._places[id(p)]] for p in moving)
            else:
                moving = tuple(p for p in group.with_state() if moved[self._places[id(p)]])
                directions = group.directions(moving)
            if moving:
                scaled = torch._foreach_mul(directions, factors[place])
                for parameter, move in zip(moving, scaled, strict=True):
                    moves[self._places[id(parameter)]] = move
        return tuple(
            torch.zeros_like(p) if move is None else move
            for p, move in zip(self._parameters, moves, strict=True)
        )

    def observe(self, before: Tensors | None) -> None:
        if self._last:
            assert before is not None
            torch._foreach_copy_(self._last, torch._foreach_sub(self._parameters, before))
        if self._fit is not None:
            per_update = [
                1.0 if by_difference else -group.lr
                for group, by_difference in zip(self._groups, self._by_difference, strict=True)
            ]
            self._fit.observe(self._displacements(per_update))

    def memory(self) -> dict[str, Tensors]:
        kept: dict[str, Tensors] = {"last": self._last} if self._last else {}
        kept |= {"moved": (self._moved,)}
        return kept | ({} if self._fit is None else self._fit.memory())
