"""What layers cost in arithmetic, counted, not timed: the same on every machine."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from offbeat import nest
from offbeat.cutting.balance import cut_by_costs
from offbeat.nest import Nest
from offbeat.stages.trial import Whole, leave_untouched, outputs_of


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


def count_between(model: nn.Module, paths: Sequence[str], batch: Nest) -> list[float]:
    """Arithmetic from the call of each module to that of the next, in one forward of the model."""
    totals: dict[str, float] = {}
    with _OperationCounter() as counter:
        hooks = [
            model.get_submodule(path).register_forward_pre_hook(
                lambda *_, path=path: totals.setdefault(path, counter.total) and None
            )
            for path in paths
        ]
        try:
            outputs_of([Whole(model)], batch)
        finally:
            for hook in hooks:
                hook.remove()
        ends = [*(totals.get(path, 0.0) for path in paths[1:]), counter.total]
    begins = [0.0, *ends[:-1]]
    return [max(0.0, end - begin) for begin, end in zip(begins, ends, strict=True)]


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
