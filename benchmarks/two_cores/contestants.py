"""What a contestant's process does in one step: a batch's forward, backward and update."""

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.two_cores.models import Workload, loss, optimizer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.methods import method_named

Step = Callable[[], float | None]
"""Trains on one batch; returns its loss where this process knows one."""


def make_step(kind: str, workload: Workload, cuts: Sequence[int], settings: dict[str, Any]) -> Step:
    rank = int(os.environ.get("RANK", "0"))
    if kind == "plain":
        return plain(workload)
    if kind == "stage":
        return stage_alone(workload, cuts, settings.get("stage", rank))
    if kind == "ddp":
        return data_parallel(workload, rank, settings)
    if kind == "pipelining":
        return torch_pipelining(workload, cuts, rank, **settings)
    assert kind == "offbeat", kind
    return offbeat_trainer(workload, cuts, **settings)


def plain(workload: Workload) -> Step:
    model, batches = workload.model(), workload.batches()
    made = optimizer(model.parameters())

    def step() -> float:
        x, y = next(batches)
        made.zero_grad()
        value = loss(model(x), y)
        value.backward()
        made.step()
        return float(value.detach())

    return step


def pieces(model: nn.Sequential, cuts: Sequence[int]) -> list[nn.Module]:
    return [model[start:end] for start, end in pairwise([0, *cuts, len(model)])]


def stage_alone(workload: Workload, cuts: Sequence[int], index: int) -> Step:
    """One stage's own work without any messages: inputs and gradients are made up once."""
    modules = pieces(workload.model(), cuts)
    x, y = next(workload.batches())
    with torch.no_grad():
        for module in modules[:index]:
            x = module(x)
        shape = modules[index](x).shape
    given = x.clone().requires_grad_(index > 0)
    gradient = None if index == len(modules) - 1 else 1e-3 * torch.randn(shape)
    made = optimizer(modules[index].parameters())

    def step() -> None:
        made.zero_grad()
        given.grad = None
        output = modules[index](given)
        if gradient is None:
            output = loss(output, y)
        output.backward(gradient)
        made.step()

    return step


def data_parallel(workload: Workload, rank: int, settings: dict[str, Any]) -> Step:
    """Each process has half of every batch."""
    dist.init_process_group("gloo")
    model, batches = DistributedDataParallel(workload.model(), **settings), workload.batches()
    made = optimizer(model.parameters())

    def step() -> float:
        x, y = (whole.chunk(2)[rank] for whole in next(batches))
        made.zero_grad()
        value = loss(model(x), y)
        value.backward()
        made.step()
        return float(value.detach())

    return step


def torch_pipelining(
    workload: Workload, cuts: Sequence[int], rank: int, *, schedule: str, micro_batches: int
) -> Step:
    dist.init_process_group("gloo")
    modules, batches = pieces(workload.model(), cuts), workload.batches()
    count = len(modules)
    if count == 2:
        mine = [rank]
    elif schedule == "ZBVZeroBubble":  # a V: down the ranks and up again
        mine = [rank, count - 1 - rank]
    else:  # a loop
        mine = [rank, rank + 2]
    stages = [PipelineStage(modules[i], i, count, torch.device("cpu")) for i in mine]
    kind: Any = get_schedule_class(schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    made_schedule = kind(stages[0] if single else stages, micro_batches, loss_fn=loss)
    made = optimizer([p for i in mine for p in modules[i].parameters()])

    def step() -> float | None:
        x, y = next(batches)
        losses: list[Tensor] = []
        made.zero_grad()
        made_schedule.step(
            *((x,) if 0 in mine else ()),
            target=y if count - 1 in mine else None,
            losses=losses if count - 1 in mine else None,
            return_outputs=False,
        )
        made.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def offbeat_trainer(
    workload: Workload, cuts: Sequence[int], *, method: str, options: dict[str, Any]
) -> Step:
    """The trainer joins the other process by itself, as it does under torchrun."""
    batches = workload.batches()
    trainer = offbeat.Trainer(
        workload.model(),
        loss=loss,
        optimizer=optimizer,
        method=method_named(method, **options),
        cuts=list(cuts),
    )

    def step() -> float | None:
        value = trainer.step(*next(batches))
        return None if value is None else float(value)

    return step
