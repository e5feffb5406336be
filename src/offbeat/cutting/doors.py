"""Doors: what stands in a model's frame for its blocks, and notes how the model calls them."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import ismethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.cutting.stand_ins import StandIn
from offbeat.errors import StageError
from offbeat.nest import Nest
from offbeat.stages.compiled import uncompiled

OnCall = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""What happens where the model calls a block: its number, arguments and settings."""


class Reached(Exception):
    """Leaves a forward once the last of the blocks has been called."""


class Door(nn.Module):
    """Stands in a model's frame where a block of another stage was, and does something else."""

    def __init__(self, block: nn.Module, on_call: Callable[..., Any]) -> None:
        super().__init__()
        del self.training  # it is the block's
        self.__dict__.update(_block=(block,), _on_call=on_call)

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        return self._on_call(arguments, settings)

    def __getattr__(self, name: str) -> Any:
        """Plain values that a forward asks a block for, such as its kind of attention."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._block[0], name)
        if isinstance(value, Tensor | nn.Module) or ismethod(value):
            raise StageError(
                f"the model's forward asks a block of another stage for {name!r}: it may call the"
                " block and read plain values. Pass a list of modules, one per stage."
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if "_block" in self.__dict__:
            raise StageError(
                f"the model's forward sets {name!r} of a block of another stage, which does not see"
                " it: give it to the block as an argument. Or pass a list of modules, one per"
                " stage."
            )
        super().__setattr__(name, value)


class Call(NamedTuple):
    """How a block is called: where its arguments lie among the values that travel."""

    arguments: list[int]
    settings: dict[str, int]
    results: list[int | None]
    """Where the tensors that it returns go; None where nobody needs one."""
    asked: list[bool]
    """Of which of them the model asks the shape or type, and is told that of the first argument."""


@uncompiled
@lru_cache(maxsize=256)
def read_calls(calls: str, own: range) -> tuple[list[Call], set[int]]:
    """How these blocks are called, and the places of the values that later ones are called with."""
    every = [Call(*call) for call in json.loads(calls)]
    later = every[own.stop :]
    needed = {place for call in later for place in [*call.arguments, *call.settings.values()]}
    return every[own.start : own.stop], needed


class Journey:
    """One batch on its way through doors: what every block is called with."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.calls: list[Call] = []
        self._places: dict[Any, int] = {}
        self._tokens: list[list[StandIn]] = []
        """Of each block."""

    def call(self, arguments: Sequence[Any], settings: dict[str, Any], output: Nest) -> Nest:
        """Notes how the next block is called, and returns tokens in the nest of its output."""
        where = [self._place(value) for value in arguments]
        named = {name: self._place(value) for name, value in settings.items()}
        number = len(self.calls)
        why = (
            f"what block {number} returned is not only given to the next blocks, and they may lie"
            " in different stages. Pass a list of modules, one per stage."
        )
        like = first_of(arguments, settings)
        tokens = [StandIn.of(like, why, sealed=True) for _ in nest.tensors(output)]
        self._tokens.append(tokens)
        self.calls.append(Call(where, named, [], []))
        fresh = iter(tokens)
        return nest.replace(output, lambda _: next(fresh))

    def _place(self, value: Any) -> int:
        key = _identity(value)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]

    def message(self, x: Nest) -> Nest:
        calls = [
            call._replace(
                results=[self._places.get(id(token)) for token in tokens],
                asked=[token.asked for token in tokens],
            )
            for call, tokens in zip(self.calls, self._tokens, strict=True)
        ]
        made = {place for call in calls for place in call.results}
        values = [None if n in made else value for n, value in enumerate(self.values)]
        return {"x": x, "values": StandIn.without(values), "calls": json.dumps(calls)}


def first_of(*arguments: Any) -> Tensor:
    """The tensor of which what a block returns is taken to have the shape and type."""
    return next(iter(nest.tensors(arguments)), torch.empty(0))


def _identity(value: Any) -> Any:
    """What two values share only if one may be sent for both."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_identity, value))
    plain = value is None or isinstance(value, bool | int | float | str)
    return (type(value), repr(value)) if plain else id(value)
