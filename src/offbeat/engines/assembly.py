"""From a cut to stages, with their heads and optimizers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.cutting.cut import Cut
from offbeat.engines.setup import Setup
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest
from offbeat.optimizers import wants_names
from offbeat.rng import seed_for, seeded
from offbeat.stages.heads import default_head
from offbeat.stages.network import Network
from offbeat.stages.stage import Stage
from offbeat.stages.trial import outputs_of

if TYPE_CHECKING:
    from offbeat.engines.pipeline import Pipeline


def make_stages(pipeline: "Pipeline", cut: Cut, batch: Nest, replica: int) -> list[Stage]:
    """The stages of one replica, ``cut`` being that of its model, that run in this process."""
    setup, modules, lanes = pipeline.setup, cut.modules, pipeline.engine.lanes
    heads = _make_heads(setup, pipeline.seed, modules, batch)
    names, norm_order = {id(p): name for name, p in cut.model.named_parameters()}, cut.norm_order()
    stages = []
    for index in pipeline.engine.placement.stages_of(replica):
        has_loss = heads[index] is not None or index == len(modules) - 1
        network = Network(
            index,
            modules[index],
            seed=pipeline.seed,
            device=setup.device,
            replica=replica,
            loss=setup.loss if has_loss else None,
            head=heads[index],
            autocast=setup.autocast,
            compile=setup.compile,
            names=names,
            penalty=setup.penalty,
        )
        stage = Stage(network, None if lanes is None else lanes[index])
        stage.correct(setup.course.corrections, len(modules), setup.monitor)
        stage.norm_order = norm_order
        _attach_optimizers(stage, setup)
        stages.append(stage)
    return stages


def _make_heads(
    setup: Setup, seed: int, modules: Sequence[nn.Module], batch: Nest
) -> list[nn.Module | None]:
    """An auxiliary head per stage but the last where a method trains with local losses."""
    method = next((method for method, _ in setup.course.phases if method.local_losses), None)
    if method is None or len(modules) == 1:
        return [None] * len(modules)
    factory = method.head_factory or default_head
    outputs = outputs_of(modules, batch)
    heads: list[nn.Module | None] = []
    for index, activation in enumerate(outputs[:-1]):
        # A state of its own, so that heads are the same however the stages are laid out.
        with seeded(seed_for(seed, stage=index, micro_batch=-1), setup.device):
            head = factory(activation, outputs[-1])
        if not isinstance(head, nn.Module):
            raise ConfigurationError(
                f"{type(method).__name__}(head=...) returned a {type(head).__name__}: it must"
                " return an nn.Module."
            )
        heads.append(head)
    return [*heads, None]


def _attach_optimizers(stage: Stage, setup: Setup) -> None:
    """Calls the user's factories for one stage and checks what they return."""
    if not any(parameter.requires_grad for parameter in stage.parameters):
        return  # factories may leave out what is frozen, and optimizers want something
    given: list[Any] = list(stage.parameters)
    if wants_names(setup.optimizer):
        given = [(stage.network.names[id(parameter)], parameter) for parameter in given]
    result = setup.optimizer(given)
    stage.optimizers = list(result) if isinstance(result, Sequence) else [result]
    _check_optimizers(stage)
    if setup.scheduler is not None:
        stage.schedulers = [_check_scheduler(setup.scheduler(o)) for o in stage.optimizers]


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
