"""One optimizer, or several, per stage, and the schedulers that count its updates."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, _muon
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.errors import ConfigurationError
from offbeat.planning import OptimizerKind
from offbeat.stage import Stage

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


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


def attach_optimizers(
    stage: Stage, optimizer: OptimizerFactory, scheduler: SchedulerFactory | None
) -> None:
    """Calls the user's factories for one stage and checks what they return."""
    if not any(parameter.requires_grad for parameter in stage.parameters):
        return  # factories may leave out what is frozen, and optimizers want something
    made = optimizer(list(stage.parameters))
    stage.optimizers = list(made) if isinstance(made, Sequence) else [made]
    _check_optimizers(stage)
    if scheduler is not None:
        stage.schedulers = [_check_scheduler(scheduler(o)) for o in stage.optimizers]


def kind_of(optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> OptimizerKind:
    """What a user's factory makes, found out with all parameters of a model, or with others."""
    # Muon takes matrices alone, and what it is combined with wants something, too.
    stand_ins = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,))]
    for given in (parameters, stand_ins, stand_ins[:1]):
        try:
            made = optimizer(list(given))
        except Exception:  # it is made for a stage, or is no function: said elsewhere
            continue
        found = list(made) if isinstance(made, Sequence) else [made]
        return _kind_of_all(found)
    return "other"


def _kind_of_all(found: Sequence[Any]) -> OptimizerKind:
    if not found:
        return "other"
    if all(isinstance(o, Adam | AdamW) for o in found):
        return "adam"
    if all(isinstance(o, Adam | AdamW | torch.optim.Muon) for o in found):
        return "muon"
    groups = [group for o in found for group in o.param_groups]
    plain = [g.get("momentum") and not g.get("nesterov") and not g.get("dampening") for g in groups]
    return "momentum" if all(isinstance(o, SGD) for o in found) and all(plain) else "other"


def _check_optimizers(stage: Stage) -> None:
    own = {id(parameter) for parameter in stage.parameters}
    taken: set[int] = set()
    for optimizer in stage.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"optimizer(params) returned a {type(optimizer).__name__}: return a torch.optim"
                " optimizer or a list of them."
            )
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates the loss again inside its step, which a stage cannot do alone:"
                " choose an optimizer that needs gradients only."
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held - own:
            raise ConfigurationError(
                f"the optimizer of stage {stage.index} holds {len(held - own)} parameters of other"
                " stages: build it from the argument, as in"
                " optimizer=lambda params: torch.optim.SGD(params, lr=0.1)."
            )
        if held & taken:
            raise ConfigurationError(
                f"stage {stage.index}: {len(held & taken)} parameters are in two optimizers and"
                " would be stepped twice. Give each to one."
            )
        taken |= held


def _check_scheduler(scheduler: Any) -> LRScheduler:
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(
            f"scheduler(optimizer) returned a {type(scheduler).__name__}: return a"
            " torch.optim.lr_scheduler that is stepped once per update without a metric."
        )
    return scheduler
