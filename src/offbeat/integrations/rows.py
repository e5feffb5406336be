"""What accelerate is told about the processes: rows of data go to replicas, not to stages.

Its state counts processes, and all that divides data goes by that count. Here a replica may be
several processes, or several replicas one process, so a count of rows takes its place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType


@dataclass
class Rows:
    """How replicas lie in the processes."""

    processes: int
    rank: int
    replicas: int

    @property
    def count(self) -> int:
        """Groups of processes that get data of their own."""
        return min(self.processes, self.replicas)

    @property
    def own(self) -> int:
        return self.rank // (self.processes // self.count)

    @property
    def replicas_here(self) -> int:
        return max(1, self.replicas // self.count)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all rows behind each other; all processes call it."""
        if self.count == 1:
            return tensor
        own = tensor.reshape(1) if tensor.dim() == 0 else tensor
        found = [torch.empty_like(own) for _ in range(self.processes)]
        dist.all_gather(found, own.contiguous())
        return torch.cat(found[:: self.processes // self.count])


class State:
    """In place of accelerate's state in TrainingArguments: as many processes as replicas."""

    def __init__(self, own: Any, rows: Rows) -> None:
        self._own = own
        self.num_processes = rows.replicas
        self.distributed_type = DistributedType.NO

    def __getattr__(self, name: str) -> Any:
        if name == "_own":
            raise AttributeError(name)
        return getattr(self._own, name)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Their accelerator where neither model nor gradients are its business."""

    rows: Rows
    alone = False
    """Whether every process reads all data: in evaluation."""
    norm_of: Callable[[], float | None] = staticmethod(lambda: None)
    """Of the gradients that stages have clipped, where one number says it."""

    @property
    def num_processes(self) -> int:
        return 1 if self.alone else self.rows.count

    @property
    def process_index(self) -> int:
        return 0 if self.alone else self.rows.own

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    @property
    def use_distributed(self) -> bool:
        return False

    @contextmanager
    def reading_all(self) -> Iterator[None]:
        before, self.alone = self.alone, True
        try:
            yield
        finally:
            self.alone = before

    def prepare_model(self, model: Any, *_: Any, **__: Any) -> Any:
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> Any:
        return optimizer

    def unwrap_model(self, model: Any, *arguments: Any, **settings: Any) -> Any:
        inner = getattr(model, "stands_for", model)
        return super().unwrap_model(inner, *arguments, **settings)

    def no_sync(self, model: Any) -> Any:  # noqa: ARG002
        return nullcontext()

    def gather(self, tensor: Any) -> Any:
        return tensor if self.alone else self.rows.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object:
            return super().gather_for_metrics(input_data)
        remainder = self.gradient_state.remainder
        ended = self.gradient_state.end_of_dataloader and remainder > 0
        return input_data[:remainder] if ended else input_data

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def clip_grad_norm_(self, *_: Any, **__: Any) -> float | None:
        """Stages have clipped their gradients, before they applied them."""
        return self.norm_of()
