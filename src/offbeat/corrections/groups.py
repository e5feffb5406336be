"""An optimizer as corrections see it: its rate, momentum, directions and gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

Tensors = tuple[Tensor, ...]


class Group:
    """One parameter group of one optimizer.

    ``direction`` is u where the optimizer's own momentum would move the weights by ``-lr u`` in the
    next update: SGD's velocity, Adam's and AdamW's first moment over the root of the second.
    """

    def __init__(self, optimizer: Optimizer, place: int) -> None:
        self._optimizer = optimizer
        self._place = place
        everything: list[nn.Parameter] = self._settings["params"]
        self.parameters = tuple(p for p in everything if p.requires_grad)
        self.optimizer_name = type(optimizer).__name__
        self.is_sgd = isinstance(optimizer, SGD)
        self.is_adam = isinstance(optimizer, Adam | AdamW)

    @property
    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self._optimizer.param_groups[self._place]  # anew after a load
        return settings

    @property
    def lr(self) -> float | Tensor:
        """A number; a tensor where the rate is kept on a GPU, so that nobody waits for it."""
        rate: float | Tensor = self._settings["lr"]
        return rate if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)

    @property
    def momentum(self) -> float | None:
        """SGD's and Muon's momentum, Adam's beta1; None where the optimizer has no such setting."""
        if "momentum" in self._settings:
            return float(self._settings["momentum"])
        if "betas" in self._settings:
            return float(self._settings["betas"][0])
        return None

    @property
    def has_direction(self) -> bool:
        """Whether the optimizer's state tells where it is heading."""
        return self.is_adam or (self.is_sgd and bool(self._settings["momentum"]))

    @property
    def plain(self) -> bool:
        """Whether a step is ``-lr`` times the direction and nothing else."""
        settings = self._settings
        return self.is_adam or (not settings.get("nesterov") and not settings.get("dampening"))

    @property
    def coupled_decay(self) -> float:
        """Weight decay that the optimizer adds to the gradient, as opposed to AdamW's."""
        settings = self._settings
        if settings.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW | Muon)):
            return 0.0
        return float(settings.get("weight_decay", 0.0))

    @property
    def maximizes(self) -> bool:
        return bool(self._settings.get("maximize"))

    def gradients(self) -> tuple[tuple[nn.Parameter, ...], Tensors]:
        """The parameters that have a gradient, and what the optimizer makes of it: with decay."""
        parameters = tuple(p for p in self.parameters if p.grad is not None)
        gradients = tuple(p.grad for p in parameters if p.grad is not None)
        if parameters and self.maximizes:
            gradients = torch._foreach_neg(gradients)
        if parameters and self.coupled_decay:
            decay = torch._foreach_mul(parameters, self.coupled_decay)
            gradients = torch._foreach_add(gradients, decay)
        return parameters, gradients

    def with_state(self) -> tuple[nn.Parameter, ...]:
        """The parameters that have been updated at least once."""
        key = "exp_avg" if self.is_adam else "momentum_buffer"
        state = self._optimizer.state
        return tuple(p for p in self.parameters if p in state and state[p].get(key) is not None)

    def directions(self, parameters: tuple[nn.Parameter, ...]) -> Tensors:
        """u for each of these parameters, which have been updated before."""
        moments = self.first_moments(parameters)
        return moments if self.is_sgd else self.over_denominator(parameters, moments)

    def first_moments(self, parameters: tuple[nn.Parameter, ...]) -> Tensors:
        """SGD's velocity or Adam's first moment, as the state holds it."""
        key = "exp_avg" if self.is_adam else "momentum_buffer"
        return tuple(self._optimizer.state[parameter][key] for parameter in parameters)

    def over_denominator(self, parameters: tuple[nn.Parameter, ...], moments: Tensors) -> Tensors:
        """Adam's step for these first moments, both bias corrections in it."""
        beta1, beta2 = self._settings["betas"]
        second = "max_exp_avg_sq" if self._settings.get("amsgrad") else "exp_avg_sq"
        quotients = []
        for parameter, moment in zip(parameters, moments, strict=True):
            state = self._optimizer.state[parameter]
            step = state["step"].double()
            root = state[second].sqrt() / (1 - beta2**step).sqrt()
            own = moment / (1 - beta1**step) / (root + self._settings["eps"])
            quotients.append(own.to(moment.dtype))  # a single number would take the step's type
        return tuple(quotients)

    def fill_state(self, parameter: nn.Parameter) -> None:
        """Sparse momentum, of a phase with sparse gradients, takes no dense ones."""
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_sparse:
                state[key] = value.to_dense()

    @contextmanager
    def set_to(self, rate: float, momentum: float | None) -> Iterator[None]:
        """Lends the optimizer another learning rate (by a factor) and momentum."""
        lent = {"lr", "momentum", "betas"}
        kept = {key: value for key, value in self._settings.items() if key in lent}
        if rate != 1.0:
            self._settings["lr"] = self._settings["lr"] * rate
        if momentum is not None and "momentum" in self._settings:
            self._settings["momentum"] = momentum
        elif momentum is not None and "betas" in self._settings:
            self._settings["betas"] = (momentum, *self._settings["betas"][1:])
        try:
            yield
        finally:
            self._settings.update(kept)


def groups_of(optimizers: Sequence[Optimizer]) -> list[Group]:
    return [Group(o, place) for o in optimizers for place in range(len(o.param_groups))]


def with_gradients(
    parameters: tuple[nn.Parameter, ...],
) -> tuple[list[int], Tensors, Tensors]:
    """The places, weights and gradients of the parameters that have a gradient."""
    places = [place for place, p in enumerate(parameters) if p.grad is not None]
    gradients = tuple(p.grad for p in parameters if p.grad is not None)
    return places, tuple(parameters[place].detach() for place in places), gradients
