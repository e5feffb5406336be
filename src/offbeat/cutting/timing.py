"""What layers cost on the device at hand, and where to cut so that stages end together."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.cutting.balance import cut_by_costs
from offbeat.cutting.counting import count_operations
from offbeat.nest import Nest
from offbeat.stages.lanes import Lane, NotRecordable
from offbeat.stages.stage import precision
from offbeat.stages.trial import leave_untouched

_REPEATS = 9
_TRIES = 6


def cut_by_time(
    modules: Sequence[nn.Module],
    batch: Nest,
    stages: int,
    *,
    autocast: torch.dtype | None = None,
    side_by_side: bool = False,
) -> list[int]:
    """Where stages begin so that each takes as long as the others, forward and backward.

    ``side_by_side``: as long as the others *while they run*, on one GPU. Layers that leave much of
    it free lose little by company and layers that fill it lose a lot, so times of layers alone
    mislead: cuts are tried, and layers are charged what their stage took among the others.
    """
    with leave_untouched(modules), torch.enable_grad():
        passes = _passes(modules, batch, autocast)
        alone = [seconds_of(work) for work in passes]
        if not side_by_side or stages == 1:
            return cut_by_costs(alone, stages)
        tried: dict[tuple[int, ...], float] = {}
        recorded: dict[tuple[int, int], _Recorded] = {}
        costs = count_operations(modules, batch)
        for _ in range(_TRIES):
            cuts = tuple(cut_by_costs(costs, stages))
            if cuts in tried:
                break
            parts = list(pairwise([0, *cuts, len(modules)]))
            for start, end in parts:
                if (start, end) not in recorded:
                    recorded[start, end] = _Recorded(_join(passes[start:end]))
            together = _seconds_together([recorded[part] for part in parts])
            tried[cuts] = max(together)
            costs = [
                seconds * alone[layer] / sum(alone[start:end])
                for (start, end), seconds in zip(parts, together, strict=True)
                for layer in range(start, end)
            ]
    best = min(tried.values())
    return next(list(cuts) for cuts, seconds in tried.items() if seconds == best)


class _Pass:
    """A forward and a backward of some modules on the same input, over and over."""

    def __init__(self, module: nn.Module, given: Nest, autocast: torch.dtype | None) -> None:
        self.module = module
        self.given = nest.replace(given, lambda t: t.detach().requires_grad_(t.is_floating_point()))
        self.autocast = autocast
        self.device = next((t.device for t in nest.tensors(given)), torch.device("cpu"))
        self._wanted: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._wanted += [t for t in nest.tensors(self.given) if t.requires_grad]

    def __call__(self) -> Nest:
        with precision(self.device, self.autocast):
            output = self.module(nest.replace(self.given, lambda t: t.clone()))
        ends = [t for t in nest.tensors(output) if t.requires_grad]
        if ends and self._wanted:
            starts = [torch.ones_like(end) for end in ends]
            torch.autograd.grad(ends, self._wanted, starts, allow_unused=True)
        return output


def _passes(modules: Sequence[nn.Module], batch: Nest, autocast: torch.dtype | None) -> list[_Pass]:
    passes = []
    for module in modules:
        passes.append(_Pass(module, batch, autocast))
        batch = nest.replace(passes[-1](), lambda t: t.detach())
    return passes


def _join(passes: Sequence[_Pass]) -> _Pass:
    first = passes[0]
    return _Pass(nn.Sequential(*(work.module for work in passes)), first.given, first.autocast)


def seconds_of(work: _Pass) -> float:
    """The time of a pass when nothing else runs."""
    if work.device.type == "cuda":
        return _seconds_together([_Recorded(work)])[0]
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


class _Recorded:
    """A pass in a lane of its own; launching it from Python does not count."""

    def __init__(self, work: _Pass) -> None:
        self.lane = Lane(work.device)
        self.lane.wait_for_caller()
        self.again: Callable[[], Any] = work
        with self.lane.entered():
            work()
            try:
                recording, _ = self.lane.record(work)
                self.again = recording.replay
            except NotRecordable:
                pass
        self.lane.caller_waits()


def _seconds_together(recorded: Sequence[_Recorded]) -> list[float]:
    """The time of a pass in each lane while all are busy."""
    torch.cuda.synchronize()
    marks: list[list[Any]] = [[] for _ in recorded]
    for _ in range(_REPEATS + 1):
        for passed, work in zip(marks, recorded, strict=True):
            with work.lane.entered():
                passed.append(work.lane.now())
                work.again()
    for passed, work in zip(marks, recorded, strict=True):
        passed.append(work.lane.now())
    torch.cuda.synchronize()
    # The first pass of a lane starts before the others have theirs.
    return [
        passed[-1].seconds_after(passed[1]) / _REPEATS if len(recorded) > 1
        else median(after.seconds_after(before) for before, after in pairwise(passed[1:]))
        for passed in marks
    ]  # fmt: skip
