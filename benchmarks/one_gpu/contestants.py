"""The four ways to train on one GPU that people use, and stages side by side."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from benchmarks.one_gpu.workloads import Workload
from torch import Tensor, nn

import offbeat
from offbeat.methods import Method

Step = Callable[[Tensor, Tensor], Any]


def _precision(workload: Workload) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if workload.bf16 else nullcontext()


def eager(workload: Workload, compiled: str | None = None) -> Step:
    """A plain loop, optionally through torch.compile in some mode."""
    model: nn.Module = workload.made()
    optimizer = workload.optimizer(list(model.parameters()))
    run: Any = model if compiled is None else torch.compile(model, mode=compiled)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with _precision(workload):
            loss = workload.loss(run(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph(workload: Workload, compiled: bool = False) -> Step:
    """The whole step, update included, as one CUDA graph."""
    model: nn.Module = workload.made()
    optimizer = workload.optimizer(list(model.parameters()))
    run: Any = torch.compile(model) if compiled else model
    static_x, static_y = (value.clone() for value in workload.batches()[0])

    def work() -> Tensor:
        optimizer.zero_grad()
        with _precision(workload):
            loss = workload.loss(run(static_x), static_y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = work()

    def step(x: Tensor, y: Tensor, _alive: Any = (model, optimizer)) -> Tensor:
        static_x.copy_(x)
        static_y.copy_(y)
        captured.replay()
        return loss

    return step


def streams(workload: Workload, method: Method, stages: int, compiled: bool = False) -> Step:
    """offbeat: the stages of one tick side by side."""
    trainer = offbeat.Trainer(
        workload.made(),
        loss=workload.loss,
        optimizer=workload.optimizer,
        method=method,
        stages=stages,
        balance="measured",
        autocast=workload.autocast,
        engine="streams",
        compile=compiled,
    )
    return trainer.step
