"""Nests: what may travel between stages: tensors in tuples, lists, dicts, with None and values."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

Nest = Any
_KNOWN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def tensors(nest: Nest) -> list[Tensor]:
    """All tensors of a nest, always in the same order."""
    if isinstance(nest, Tensor):
        return [nest]
    found: list[Tensor] = []
    replace(nest, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def replace(nest: Nest, function: Callable[[Tensor], Any]) -> Nest:
    """The same nest with ``function`` applied to every tensor."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(replace(part, function) for part in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(replace(part, function) for part in nest)
    if isinstance(nest, dict):
        same = copy(nest)  # keeps what a kind of dict may carry beside its items
        for key, part in nest.items():
            same[key] = replace(part, function)
        return same
    return nest


def stranger(nest: Nest) -> Any:
    """The first part that is neither tensor, container nor plain value; it may hide tensors."""
    if isinstance(nest, dict):
        nest = tuple(nest.values())
    if isinstance(nest, (tuple, list)):
        return next((found for part in nest if (found := stranger(part)) is not None), None)
    return None if nest is None or isinstance(nest, _KNOWN) else nest


def split(nest: Nest, parts: int) -> list[Nest]:
    """A nest per micro-batch: every tensor cut along its rows as ``tensor_split`` does."""
    if parts == 1:
        return [nest]
    pieces = {id(tensor): tensor.tensor_split(parts) for tensor in tensors(nest)}
    return [replace(nest, lambda t, i=i: pieces[id(t)][i]) for i in range(parts)]  # type: ignore[misc]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without holes, in whatever order."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
