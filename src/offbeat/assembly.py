"""From a cut to workers: stages with their heads and optimizers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from offbeat.errors import ConfigurationError
from offbeat.graphs import GraphStage
from offbeat.heads import default_head
from offbeat.lanes import Lane
from offbeat.methods import DGL, Method
from offbeat.nest import Nest
from offbeat.optimizers import OptimizerFactory, SchedulerFactory, attach_optimizers
from offbeat.rng import seed_for, seeded
from offbeat.stage import Loss, Stage
from offbeat.trial import outputs_of


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every stage of a trainer is made with."""

    loss: Loss
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    autocast: torch.dtype | None
    device: torch.device
    seed: int
    compile: bool = False
    lanes: Sequence[tuple[Lane, Lane]] | None = None
    """Where each stage queues its work, under the streams engine."""

    def stages(
        self,
        modules: Sequence[nn.Module],
        heads: Sequence[nn.Module | None],
        here: Iterable[int],
        replica: int,
    ) -> list[Stage]:
        """The stages of one replica that run in this process."""
        made = []
        for index in here:
            has_loss = heads[index] is not None or index == len(modules) - 1
            kind = Stage if self.lanes is None else partial(GraphStage, lanes=self.lanes[index])
            stage = kind(
                index,
                modules[index],
                seed=self.seed,
                device=self.device,
                replica=replica,
                loss=self.loss if has_loss else None,
                head=heads[index],
                autocast=self.autocast,
                compile=self.compile,
            )
            attach_optimizers(stage, self.optimizer, self.scheduler)
            made.append(stage)
        return made

    def heads(
        self, methods: Iterable[Method], modules: Sequence[nn.Module], batch: Nest
    ) -> list[nn.Module | None]:
        """An auxiliary head per stage but the last where a method trains with local losses."""
        greedy = next((method for method in methods if isinstance(method, DGL)), None)
        if greedy is None or len(modules) == 1:
            return [None] * len(modules)
        factory = greedy.head or default_head
        outputs = outputs_of(modules, batch)
        heads: list[nn.Module | None] = []
        for index, activation in enumerate(outputs[:-1]):
            # A state of its own, so that heads are the same however the stages are laid out.
            with seeded(seed_for(self.seed, stage=index, micro_batch=-1), self.device):
                head = factory(activation, outputs[-1])
            if not isinstance(head, nn.Module):
                raise ConfigurationError(
                    f"DGL(head=...) returned a {type(head).__name__}: it must return an nn.Module."
                )
            heads.append(head)
        return [*heads, None]
