"""Weight prediction: go forward with the weights that the gradient will meet."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from offbeat.corrections.base import Correction, Hook, Moment, Numbers, Surroundings, require_number
from offbeat.corrections.groups import Group, Tensors
from offbeat.corrections.read_weights import refuse_holes
from offbeat.corrections.sample import Sample
from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.base import Rule

Direction = Literal["optimizer", "difference"]
Horizon = Literal["lag", "geometric", "fitted"]
_DECAY = 0.98
"""Of the means that a fitted horizon is read off."""


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
        self._places = {p: place for place, p in enumerate(around.parameters)}
        self._parameters = around.parameters
        by_optimizer = settings.direction == "optimizer"
        self._by_difference = [not (by_optimizer and g.has_direction) for g in self._groups]
        self.needs_before = any(self._by_difference)
        self._last: Tensors = ()
        """The last update of every parameter, where any group goes by it."""
        if self.needs_before:
            self._last = tuple(torch.zeros_like(p) for p in around.parameters)
        self._moved = torch.zeros(len(around.parameters), dtype=torch.bool)  # on the host
        """Which parameters the last update had a gradient for: only they are on their way."""
        fitted = settings.horizon == "fitted"
        self._fit = HorizonFit(around.parameters, around.lag) if fitted else None

    def numbers(self, moment: Moment) -> Numbers:
        """Per group the factor on its direction; with a fitted horizon, the lag behind them."""
        if moment.lag == 0 or moment.update == 0:
            return ()
        factors = self._factors(moment.lag)
        return factors if self._fit is None else [*factors, float(moment.lag)]

    def _factors(self, lag: int) -> list[float | Tensor]:
        """Per group; a fitted horizon, which is known on the device alone, is not in them."""
        factors: list[float | Tensor] = []
        for group, by_difference in zip(self._groups, self._by_difference, strict=True):
            horizon = self._horizon(group, lag)
            factors.append(horizon if by_difference else -group.lr * horizon)
        return factors

    def _horizon(self, group: Group, lag: int) -> float:
        horizon = self._settings.horizon
        if not isinstance(horizon, str):
            return horizon
        if horizon == "geometric":
            momentum = group.momentum
            assert momentum is not None
            return sum(momentum**i for i in range(1, lag + 1))
        return float(lag) if horizon == "lag" else 1.0

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
        moves: dict[nn.Parameter, Tensor] = {}
        for place, group in enumerate(self._groups):
            if self._by_difference[place]:
                moving = group.parameters
                directions = tuple(self._last[self._places[p]] for p in moving)
            else:
                moving = tuple(p for p in group.with_state() if moved[self._places[p]])
                directions = group.directions(moving)
            if moving:
                scaled = torch._foreach_mul(directions, factors[place])
                moves.update(zip(moving, scaled, strict=True))
        return tuple(moves[p] if p in moves else torch.zeros_like(p) for p in self._parameters)

    def observe(self, before: Tensors | None) -> None:
        if self._last:
            assert before is not None
            torch._foreach_copy_(self._last, torch._foreach_sub(self._parameters, before))
        if self._fit is not None:
            self._fit.observe(self._displacements(self._factors(lag=1)))

    def memory(self) -> dict[str, Tensors]:
        fit = () if self._fit is None else self._fit.memory
        return {"last": self._last, "moved": (self._moved,), "fit": fit}


class HorizonFit:
    """T minimising ``norm(w[t+D] - w[t] - T d[t])``: ``<w[t+D] - w[t], d[t]> / <d[t], d[t]>``.

    Both products are running means. A hundredth of the coordinates is enough for them, so that the
    history of D updates costs D / 50 copies of the weights instead of 2 D.
    """

    def __init__(self, parameters: tuple[nn.Parameter, ...], lag: int) -> None:
        self._parameters = parameters
        self._lag = lag
        self._sample = Sample(parameters)
        shape = (lag, self._sample.size)
        self._weights = parameters[0].detach().new_zeros(shape, dtype=self._sample.dtype)
        self._moves = torch.zeros_like(self._weights)
        # Rows of zeros, before there is a history, add nothing to either product.
        self._products = self._weights.new_zeros(2)

    def horizon(self, most: float) -> Tensor:
        """T for a micro-batch that will lag by ``most``; half of it while nothing is known."""
        along, square = self._products
        known = along / torch.where(square > 0, square, 1.0)
        return torch.where(square > 0, known, 0.5 * self._lag).clamp(0.0, most)

    def observe(self, displacements: Tensors) -> None:
        """Compares today's weights with the oldest forecast, and adds today's to the history."""
        weights, moves = self._sample.of(self._parameters), self._sample.of(displacements)
        then = self._moves[0]
        products = torch.stack([(weights - self._weights[0]) @ then, then @ then])
        self._products.lerp_(products, 1 - _DECAY)
        for history, newest in ((self._weights, weights), (self._moves, moves)):
            history.copy_(torch.cat([history[1:], newest[None]]))

    @property
    def memory(self) -> Tensors:
        return self._weights, self._moves, self._products
