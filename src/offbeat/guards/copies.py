"""Copies of a stage that a guard returns to when an update is dropped."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from offbeat.stages.stage import Stage


class Copy:
    """A stage at some version: its statistics and, if whole, all other buffers and what it learns.

    Statistics are whatever can become not finite: nothing says which buffers a forward writes.
    BatchNorm's are written without counting, those of a codebook often through ``.data``. So values
    are compared, and what has not changed since the copy ``before`` is shared with it: most buffers
    are tables and masks, which never change.
    """

    def __init__(self, stage: Stage, before: "Copy | None", *, whole: bool) -> None:
        self.version = stage.version
        self._stage = stage
        self._whole = whole
        buffers = self._statistics()
        if before is None:
            self.buffers = [buffer.clone() for buffer in buffers]
        else:
            self.buffers = list(before.buffers)
            changed = [n for n, b in enumerate(buffers) if not _equal(b, self.buffers[n])]
            # A forward may have spoilt running statistics before its gradient is met here.
            for n, finite in zip(changed, are_finite([buffers[n] for n in changed]), strict=True):
                if finite:
                    self.buffers[n] = buffers[n].clone()
        self._weights = [p.detach().clone() for p in stage.parameters] if whole else []
        self._states = [
            {parameter: deepcopy(state) for parameter, state in optimizer.state.items()}
            for optimizer in (stage.optimizers if whole else ())
        ]

    def _statistics(self) -> list[Tensor]:
        found = [b for module in self._stage.modules for b in module.buffers()]
        return [b for b in found if self._whole or values_of(b).is_floating_point()]

    def snapshot(self) -> dict[str, Any]:
        number = {id(p): n for n, p in enumerate(self._stage.parameters)}
        return {
            "version": self.version,
            "buffers": list(self.buffers),
            "weights": list(self._weights),
            "states": [
                [[number[id(parameter)], deepcopy(state)] for parameter, state in states.items()]
                for states in self._states
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.version, self.buffers = state["version"], state["buffers"]
        self._weights = state["weights"]
        parameters = self._stage.parameters
        self._states = [
            {parameters[number]: of for number, of in states} for states in state["states"]
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        buffers = self._statistics()
        for buffer, kept, finite in zip(buffers, self.buffers, are_finite(buffers), strict=True):
            if self._whole or not finite:
                # Fresh memory: a graph in flight may still refer to the old.
                buffer.data = kept.clone()
        if not self._whole:
            return
        for parameter, weight in zip(self._stage.parameters, self._weights, strict=True):
            parameter.copy_(weight)
        for optimizer, states in zip(self._stage.optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({p: deepcopy(state) for p, state in states.items()})


def values_of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _equal(buffer: Tensor, kept: Tensor) -> bool:
    """Whether a buffer is known not to have changed; on a GPU to copy it is cheaper than to ask."""
    return buffer.device.type == "cpu" and not buffer.is_sparse and torch.equal(buffer, kept)


def are_finite(buffers: Sequence[Tensor]) -> list[bool]:
    """Of each whether all its values are; asked at once, since a GPU lets every answer wait."""
    asked = [n for n, buffer in enumerate(buffers) if values_of(buffer).is_floating_point()]
    found = [True] * len(buffers)
    if asked:
        whole = torch.stack([torch.isfinite(values_of(buffers[n])).all() for n in asked])
        for n, answer in zip(asked, whole.tolist(), strict=True):
            found[n] = answer
    return found
