"""What a stored run was asked to do, and what runs of several seeds as one have in common."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, ClassVar, Self

import torch
from benchmarks.stored import Row
from torch import nn


class Asked:
    """A dataclass of plain values and tuples, found again by what it asks for."""

    own: ClassVar[tuple[str, ...]]
    """In which fields runs that are compared may differ."""

    @property
    def key(self) -> str:
        return json.dumps(self._values(), sort_keys=True)

    @property
    def setting(self) -> str:
        """What runs must share to be compared at all."""
        shared = {name: value for name, value in self._values().items() if name not in self.own}
        return json.dumps(shared, sort_keys=True)

    @classmethod
    def of(cls, row: Row) -> Self:
        """What a stored row was asked."""
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row.items()
            if name in known
        })  # fmt: skip

    def _values(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]


def share_of_rate(update: int, updates: int) -> float:
    """Up in a line over the first tenth, then down to nothing in half a cosine."""
    warm_up = max(1, updates // 10)
    if update < warm_up:
        return (update + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (update - warm_up) / max(1, updates - warm_up)))


def layers_of(
    make: Callable[[], nn.Sequential], seeds: Sequence[int]
) -> Iterator[tuple[nn.Module, ...]]:
    """Layer by layer, the networks that ``make`` returns under each seed."""
    members = []
    for seed in seeds:
        torch.manual_seed(seed)
        members.append(make())
    return zip(*members, strict=True)
