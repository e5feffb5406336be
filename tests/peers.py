"""What other people's code does with the same model and batches: one call per process."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

from helpers import OPTIMIZERS, Batch, cnn, image_batches, vector_batches
from jobs import dropout_net

State = dict[str, Tensor]


def job_of(model: str) -> tuple[nn.Sequential, list[Batch]]:
    """Without dropout, whose masks every library draws its own way."""
    if model == "batch norm":
        return cnn(), image_batches(6, rows=8)
    if model == "convolutions":
        return without_batch_norm(cnn()), image_batches(6, rows=8)
    return (
        nn.Sequential(*(m for m in dropout_net() if not isinstance(m, nn.Dropout))),
        vector_batches(6, rows=8, dtype=torch.float32),
    )


def without_batch_norm(model: nn.Sequential) -> nn.Sequential:
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(2, child.num_features))
    return model


def join() -> tuple[int, int]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def cuts_of(model: nn.Sequential, stages: int) -> list[int]:
    return [len(model) * k // stages for k in range(1, stages)]


def pipeline(cases: list[tuple[str, str, str, int]]) -> list[State]:
    """``torch.distributed.pipelining``: per case the state of this process's stage."""
    rank, size = join()
    states = []
    for schedule, model, optimizer, micro_batches in cases:
        whole, batches = job_of(model)
        start, end = list(pairwise([0, *cuts_of(whole, size), len(whole)]))[rank]
        module = copy.deepcopy(whole[start:end])
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        kind: Any = get_schedule_class(schedule)
        run = kind(stage, micro_batches, loss_fn=nn.functional.cross_entropy)
        steps = OPTIMIZERS[optimizer](module.parameters())
        for x, y in batches:
            steps.zero_grad()
            run.step(
                *((x,) if rank == 0 else ()),
                target=y if rank == size - 1 else None,
                losses=[] if rank == size - 1 else None,
                return_outputs=False,
            )
            steps.step()
        states.append(module.state_dict())  # a slice keeps the names of the whole
    return states


def own_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return x.chunk(size)[rank], y.chunk(size)[rank]


def data_parallel(model: str, optimizer: str) -> State:
    """DistributedDataParallel."""
    join()
    network, batches = job_of(model)
    parallel = DistributedDataParallel(network)
    steps = OPTIMIZERS[optimizer](parallel.parameters())
    for x, y in (own_rows(*batch) for batch in batches):
        steps.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        steps.step()
    return network.state_dict()


def average_periodically(model: str, optimizer: str, every: int, warmup: int) -> State:
    """Torch's averager; it begins after its warm-up with an update that is averaged."""
    join()
    network, batches = job_of(model)
    averager = PeriodicModelAverager(period=every, warmup_steps=warmup)
    steps = OPTIMIZERS[optimizer](network.parameters())
    for x, y in (own_rows(*batch) for batch in batches):
        steps.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        steps.step()
        averager.average_parameters(network.parameters())
    return network.state_dict()


def post_local(model: str, optimizer: str, every: int, switch: int) -> State:
    """DistributedDataParallel up to ``switch``, then torch's ``PostLocalSGDOptimizer``."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns of torch's own jit

    join()
    network, batches = job_of(model)
    parallel = DistributedDataParallel(network)
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=switch,
        post_local_gradient_allreduce=False,
    )
    parallel.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=switch)
    steps = PostLocalSGDOptimizer(OPTIMIZERS[optimizer](parallel.parameters()), averager)
    for x, y in (own_rows(*batch) for batch in batches):
        steps.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        steps.step()
    return network.state_dict()
