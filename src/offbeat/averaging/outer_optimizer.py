"""A step of a torch optimizer as a function: what it remembers goes in and comes out.

Outer rules replace what they remember and never write to it. An optimizer writes, so each step is
taken by a fresh one, over copies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from offbeat import nest
from offbeat.averaging.flat import flatten
from offbeat.errors import ConfigurationError

Memory = list[dict[str, Any]]
"""The ``state_dict`` of each optimizer; empty before the first step."""


def stepped(
    make: Callable[[list[nn.Parameter]], Any],
    memory: Memory,
    shapes: Sequence[tuple[int, ...]],
    start: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Memory]:
    """Where a step from ``start`` along a gradient leads, and what the optimizers keep of it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parameters = [
        nn.Parameter(piece.view(shape))
        for piece, shape in zip(start.clone().split(sizes), shapes, strict=True)
    ]
    optimizers = _made(make, parameters)
    for optimizer, own in zip(optimizers, memory, strict=False):  # there is none at first
        _put_back(optimizer, nest.replace(own, lambda tensor: tensor.clone()))
    for parameter, piece in zip(parameters, gradient.split(sizes), strict=True):
        parameter.grad = piece.view(parameter.shape).clone()
    for optimizer in optimizers:
        optimizer.step()
    return flatten(parameters), [optimizer.state_dict() for optimizer in optimizers]


def _put_back(optimizer: Optimizer, own: dict[str, Any]) -> None:
    """As ``load_state_dict`` does, but without casting: NAdam multiplies in another precision."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, state in own["state"].items():
        optimizer.state[parameters[place]] = state
    for group, settings in zip(optimizer.param_groups, own["param_groups"], strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})


def _made(make: Callable[[list[nn.Parameter]], Any], parameters: list[nn.Parameter]) -> Any:
    made = make(list(parameters))
    optimizers = list(made) if isinstance(made, Sequence) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                f"outer_optimizer(params) returned a {type(optimizer).__name__}: return a"
                " torch.optim optimizer that needs gradients only, or a list of them."
            )
    held = [id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]]
    if sorted(held) != sorted(map(id, parameters)):
        raise ConfigurationError(
            f"outer_optimizer(params) got {len(parameters)} parameters and its optimizers hold"
            f" {len(held)}: each must be in exactly one, or what replicas learnt of it would be"
            " lost. Frozen weights are not among them."
        )
    return optimizers
