"""A stage's optimizer and scheduler, made from those of the whole model."""

from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from offbeat.errors import ConfigurationError

_ALONE = ("lomo", "layerwise", "schedulefree", "dummy")


def check_optimizer(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    switches = callable(getattr(optimizer, "train", None))
    if not isinstance(optimizer, Optimizer) or switches or kind.lower().startswith(_ALONE):
        raise ConfigurationError(
            f"optimizer {kind}: every stage steps its own, made like this one with the stage's"
            " weights, and this one cannot be made so (it steps during the backward, or has modes)."
            " Give an optimizer of torch.optim, for example optim='adamw_torch'."
        )


def check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(
            f"lr_scheduler {type(scheduler).__name__} goes by a metric, and stages step theirs once"
            " per update: give one that counts steps, for example lr_scheduler_type='cosine'."
        )


def optimizers_like(
    whole: Optimizer, model: nn.Module
) -> Callable[[list[tuple[str, nn.Parameter]]], Optimizer]:
    """For one stage after the other: the same groups with the weights of the stage alone.

    They go by names, which the weights of other replicas have, too.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [{names[id(p)] for p in group["params"]} for group in whole.param_groups]

    def make(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        own = copy(whole)  # as it would come out of a pickle: settings, without hooks
        own.state = defaultdict(dict)
        own.param_groups = [
            {**group, "params": [p for name, p in named if name in names_of_group]}
            for group, names_of_group in zip(whole.param_groups, held, strict=True)
        ]
        return own

    return make


def schedulers_like(whole: LRScheduler, optimizer: Optimizer) -> Callable[[Optimizer], LRScheduler]:
    """Copies of a scheduler that step the optimizer of a stage, not the whole model's."""

    def make(own: Optimizer) -> LRScheduler:
        rates = [group["lr"] for group in own.param_groups]
        LambdaLR(own, lambda _: 1.0)  # from here on its steps are counted, which schedulers ask for
        for group, rate in zip(own.param_groups, rates, strict=True):
            group["lr"] = rate
        return deepcopy(whole, {id(optimizer): own})

    return make


def take_weights(optimizer: Optimizer) -> Callable[[], None]:
    """Leaves it groups, rates and schedule, to be shown; returns what gives the weights back."""
    held = [group["params"] for group in optimizer.param_groups]

    def give_back() -> None:
        for group, own in zip(optimizer.param_groups, held, strict=True):
            group["params"] = own

    for group in optimizer.param_groups:
        group["params"] = []
    return give_back
