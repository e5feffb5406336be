"""What layers cost, and where to cut so that stages cost the same.

Costs are arithmetic, which is counted and the same on every machine, or time, which is measured on
the device at hand.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from offbeat import nest
from offbeat.cutting.balance import cut_by_costs
from offbeat.nest import Nest
from offbeat.stages.lanes import Lane, NotRecordable
from offbeat.stages.network import precision
from offbeat.stages.trial import leave_untouched

_REPEATS = 9
_TRIES = 6


def cut_by_count(modules: Sequence[nn.Module], batch: Nest, stages: int) -> list[int]:
    """Where stages begin so that each has as much arithmetic as the others."""
    return cut_by_costs(count_operations(modules, batch), stages)


def count_operations(modules: Sequence[nn.Module], batch: Nest) -> list[float]:
    """Arithmetic of the forward of each module, when they run one after the other."""
    counts = []
    value = nest.replace(batch, lambda t: t.clone())
    with leave_untouched(modules):
        for module in modules:
            with _OperationCounter() as counter:
                value = module(value)
            counts.append(counter.total)
    return counts


class Spans:
    """Arithmetic from the call of each of these modules to that of the next, in one forward."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self._model, self._paths = model, paths
        self._calls: list[tuple[str, float]] = []
        self._counter = _OperationCounter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around the forward of the model."""
        with self._counter, ExitStack() as hooks:
            for path in self._paths:
                hooks.enter_context(
                    self._model.get_submodule(path).register_forward_pre_hook(
                        lambda *_, path=path: self._calls.append((path, self._counter.total))
                    )
                )
            yield

    @property
    def before(self) -> float:
        """What comes before the first of them."""
        return self._calls[0][1] if self._calls else self._counter.total

    def of_each(self) -> dict[str, float]:
        """In the order of the calls, and of modules that are called once."""
        often = Counter(path for path, _ in self._calls)
        once = {path: begin for path, begin in self._calls if often[path] == 1}
        ends = [*once.values(), self._counter.total][1:]
        begins = [0.0, *ends[:-1]]
        return {path: end - begin for path, end, begin in zip(once, ends, begins, strict=True)}


class _OperationCounter(TorchDispatchMode):
    """Matrix products by PyTorch's own formulas; everything else one operation per element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        elif not func.is_view:
            self.total += sum(tensor.numel() for tensor in nest.tensors(result))
        return result


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
        inputs, alone = [batch], []
        for module in modules:
            work = _Pass(module, inputs[-1], autocast)
            inputs.append(nest.replace(work(), lambda t: t.detach()))
            alone.append(seconds_of(work))
        if not side_by_side or stages == 1:
            return cut_by_costs(alone, stages)
        slowest: dict[tuple[int, ...], float] = {}
        recordings: dict[tuple[int, int], _Recording] = {}
        costs = count_operations(modules, batch)
        for _ in range(_TRIES):
            cuts = tuple(cut_by_costs(costs, stages))
            if cuts in slowest:
                break
            parts = list(pairwise([0, *cuts, len(modules)]))
            for start, end in parts:
                if (start, end) not in recordings:
                    part = nn.Sequential(*modules[start:end])
                    recordings[start, end] = _Recording(_Pass(part, inputs[start], autocast))
            together = _seconds_together([recordings[place] for place in parts])
            slowest[cuts] = max(together)
            costs = [
                seconds * alone[layer] / sum(alone[start:end])
                for (start, end), seconds in zip(parts, together, strict=True)
                for layer in range(start, end)
            ]
    best, _ = min(slowest.items(), key=lambda item: item[1])
    return list(best)


class _Pass:
    """A forward and a backward of a module on the same input, over and over."""

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


def seconds_of(work: _Pass) -> float:
    """The time of a pass when nothing else runs."""
    if work.device.type == "cuda":
        return _seconds_together([_Recording(work)])[0]
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


class _Recording:
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


def _seconds_together(recordings: Sequence[_Recording]) -> list[float]:
    """The time of a pass in each lane while all are busy."""
    torch.cuda.synchronize()
    marks: list[list[Any]] = [[] for _ in recordings]
    for _ in range(_REPEATS + 1):
        for times, work in zip(marks, recordings, strict=True):
            with work.lane.entered():
                times.append(work.lane.now())
                work.again()
    for times, work in zip(marks, recordings, strict=True):
        times.append(work.lane.now())
    torch.cuda.synchronize()
    # The first pass of a lane starts before the others have theirs.
    if len(recordings) > 1:
        return [times[-1].seconds_after(times[1]) / _REPEATS for times in marks]
    return [median(b.seconds_after(a) for a, b in pairwise(times[1:])) for times in marks]
