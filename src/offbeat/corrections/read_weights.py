"""The weights that forwards have read, for corrections that compare them with the newest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.corrections.base import Surroundings
from offbeat.corrections.groups import Tensors
from offbeat.errors import ConfigurationError
from offbeat.methods.base import Rule
from offbeat.nest import is_dense


class ReadWeights:
    """One copy per version that something in flight may have read, in memory allocated once."""

    def __init__(self, parameters: tuple[nn.Parameter, ...], lag: int, micro_batches: int) -> None:
        self._parameters = parameters
        self._copies = [tuple(torch.zeros_like(p) for p in parameters) for _ in range(lag + 1)]
        self._versions: list[int | None] = [None] * (lag + 1)
        self._mean = tuple(torch.zeros_like(p) for p in parameters) if micro_batches > 1 else ()

    def keep(self, version: int, values: Sequence[Tensor] | None) -> Tensors:
        """A copy of what a forward reads; one per version, however many forwards read it."""
        place = version % len(self._copies)
        if self._versions[place] != version:
            given = self._parameters if values is None else values
            torch._foreach_copy_(self._copies[place], [v.detach() for v in given])
            self._versions[place] = version
        return self._copies[place]

    def mean_of(self, read: Sequence[Tensors]) -> Tensors:
        """The mean over the micro-batches of one update."""
        if len(read) == 1:
            return read[0]
        torch._foreach_zero_(self._mean)
        for one in read:
            torch._foreach_add_(self._mean, one, alpha=1 / len(read))
        return self._mean

    def forget(self) -> None:
        self._versions = [None] * len(self._versions)

    def at(self, place: int) -> Tensors:
        return self._copies[place]

    def place_of(self, kept: Tensors) -> int | None:
        """Where a copy lies; None if it is none of these."""
        return next((place for place, copy in enumerate(self._copies) if copy is kept), None)

    def tensors(self) -> list[Tensor]:
        return [*(tensor for copy in self._copies for tensor in copy), *self._mean]

    def snapshot(self) -> dict[str, Any]:
        return {
            "versions": list(self._versions),
            "copies": [[tensor.clone() for tensor in copy] for copy in self._copies],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._versions = list(state["versions"])
        for copy, values in zip(self._copies, state["copies"], strict=True):
            torch._foreach_copy_(copy, values)


def refuse_maximizing(name: str, around: Surroundings) -> None:
    if any(group.maximizes for group in around.groups):
        raise ConfigurationError(
            f"{name} takes gradients of what is made small, and an optimizer of stage"
            f" {around.stage} has maximize=True: negate the loss instead."
        )


def refuse_holes(name: str, around: Surroundings) -> None:
    """Of parameters that are views: what is lent in their place is laid out without holes."""
    for place, parameter in enumerate(around.parameters):
        if not is_dense(parameter):
            raise ConfigurationError(
                f"{name} lends weights of the same layout, and weight {place} of stage"
                f" {around.stage}, of shape {tuple(parameter.shape)}, is a view with holes in it."
                " Make it nn.Parameter(view.clone())."
            )


def refuse_recompute(name: str, rule: Rule) -> None:
    if rule == "recompute":
        raise ConfigurationError(
            f"{name} makes up for the way from the weights a gradient was computed at to the"
            " newest, and under backward='recompute' these are the same. Use it with"
            " backward='stash' or 'current', or leave it out."
        )
