"""One optimizer, or several, per stage, and the schedulers that count its updates."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, _muon
from torch.optim.lr_scheduler import LRScheduler

from offbeat.methods.auto import OptimizerKind

OptimizerFactory = Callable[[list[Any]], Optimizer | Sequence[Optimizer]]
"""Of parameters; or of pairs (name, parameter), if it calls its argument ``named``."""
SchedulerFactory = Callable[[Optimizer], LRScheduler]


def wants_names(factory: OptimizerFactory) -> bool:
    """Whether it is to be called with pairs, for groups that go by name."""
    try:
        arguments = [*inspect.signature(factory).parameters]
    except (TypeError, ValueError):  # such as a class of C
        return False
    return arguments[:1] == ["named"]


class Muon(torch.optim.Muon):
    """PyTorch's Muon with a learning rate that may be a tensor on the device.

    The streams engine can then record its steps while a schedule changes the rate. With a number
    for a rate it is PyTorch's.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["capturable"] = True  # it counts nothing

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not any(isinstance(group["lr"], Tensor) for group in self.param_groups):
            return super().step(closure)  # type: ignore[no-untyped-call]
        assert closure is None, "a stage gives gradients, not a closure"
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
            self._init_group(group, *lists)
            for weight, gradient, velocity in zip(*lists, strict=True):
                velocity.lerp_(gradient, 1 - momentum)
                way = gradient.lerp(velocity, momentum) if group["nesterov"] else velocity
                way = _muon._zeropower_via_newtonschulz(
                    way, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                weight.mul_(1 - rate * group["weight_decay"])
                length = _muon._adjust_lr(rate, group["adjust_lr_fn"], weight.shape)
                weight.sub_(way.to(weight.dtype) * length)  # the way is in bfloat16
        return None


def kind_of(
    optimizer: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]
) -> OptimizerKind:
    """What a user's factory makes, found out with all parameters of a model, or with others."""
    # Muon takes matrices alone, and what it is combined with wants something, too.
    shapes = {"weight": (2, 2), "bias": (2,)}
    stand_ins = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    by_name = wants_names(optimizer)
    for given in (named, stand_ins, stand_ins[:1]):
        try:
            result = optimizer([pair if by_name else pair[1] for pair in given])
        except Exception:  # it is made for a stage, or is no function: said elsewhere
            continue
        return _kind_of_all(list(result) if isinstance(result, Sequence) else [result])
    return "other"


def _kind_of_all(optimizers: Sequence[Any]) -> OptimizerKind:
    if not optimizers:
        return "other"
    if all(isinstance(o, Adam | AdamW) for o in optimizers):
        return "adam"
    if all(isinstance(o, Adam | AdamW | torch.optim.Muon) for o in optimizers):
        return "muon"
    groups = [group for o in optimizers for group in o.param_groups]
    ahead = [isinstance(o, NAdam) or g.get("nesterov") for o in optimizers for g in o.param_groups]
    if all(isinstance(o, SGD | NAdam) for o in optimizers) and all(ahead):
        return "nesterov"
    plain = [g.get("momentum") and not g.get("nesterov") and not g.get("dampening") for g in groups]
    return "momentum" if all(isinstance(o, SGD) for o in optimizers) and all(plain) else "other"
