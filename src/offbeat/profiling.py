"""What layers cost on the device at hand: time, where counting operations would mislead."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.cut import untouched
from offbeat.lanes import Lane, NotRecordable
from offbeat.nest import Nest
from offbeat.stage import precision

_REPEATS = 9


def measured_times(
    modules: Sequence[nn.Module], batch: Nest, autocast: torch.dtype | None = None
) -> list[float]:
    """Seconds of each module's forward and backward, one after the other, nothing else running.

    On a GPU the work is recorded first, so that launching it from Python does not count.
    """
    device = next((t.device for t in nest.tensors(batch)), torch.device("cpu"))
    value = nest.replace(batch, lambda t: t.clone())
    times = []
    for module in modules:
        work = _Pass(module, value, device, autocast)
        with untouched([module]), torch.enable_grad():
            work()
            times.append(_seconds_on_gpu(work, device) if device.type == "cuda" else _seconds(work))
        value = nest.replace(work.output, lambda t: t.detach())
    return times


class _Pass:
    """A forward and a backward of one module on the same input, over and over."""

    def __init__(
        self, module: nn.Module, given: Nest, device: torch.device, autocast: torch.dtype | None
    ) -> None:
        self._module = module
        self._given = nest.replace(
            given, lambda t: t.detach().requires_grad_(t.is_floating_point())
        )
        self._precision = partial(precision, device, autocast)
        self._wanted: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._wanted += [t for t in nest.tensors(self._given) if t.requires_grad]
        self.output: Nest = None

    def __call__(self) -> None:
        with self._precision():
            self.output = self._module(nest.replace(self._given, lambda t: t.clone()))
        ends = [t for t in nest.tensors(self.output) if t.requires_grad]
        if ends and self._wanted:
            starts: list[Tensor] = [torch.ones_like(end) for end in ends]
            torch.autograd.grad(ends, self._wanted, starts, allow_unused=True)


def _seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def _seconds_on_gpu(work: Callable[[], Any], device: torch.device) -> float:
    lane = Lane(device)
    lane.wait_for_caller()
    with lane.entered():
        work()
        try:
            recording, _ = lane.record(work)
        except NotRecordable:
            again: Callable[[], Any] = work
        else:
            again = recording.replay
        marks = [lane.now()]
        for _ in range(_REPEATS):
            again()
            marks.append(lane.now())
    lane.caller_waits()
    torch.cuda.synchronize(device)
    return median(b.seconds_after(a) for a, b in pairwise(marks))
