"""A stage's optimizer and scheduler, made from those of the whole model."""

from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

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
        count_steps(own, lambda: type(own).step(own))
        return deepcopy(whole, {id(optimizer): own})

    return make


def count_steps(optimizer: Any, step: Callable[[], Any]) -> None:
    """Gives an optimizer a ``step`` that schedulers know to be called, as they ask for."""

    def counted(*_: Any, **__: Any) -> Any:
        return step()

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step, optimizer._opt_called = counted, True
