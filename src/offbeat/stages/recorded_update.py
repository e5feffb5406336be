"""The update of a recorded stage: where its gradients are gathered, and when it can be recorded."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Muon, Optimizer

from offbeat.stages.lanes import Lane, NotRecordable, Recording

_COUNT_NOTHING = (SGD, Muon)
"""Optimizers whose step is the same work each time, so that they need no ``capturable``."""
_PATIENCE = 20
"""Updates with new numbers each, after which the user is told what that costs."""

Numbers = tuple[Any, ...]
"""What a recorded update has built in."""


class GatheredGradients:
    """A place for the newest micro-batch's gradients, and one for a step's sum if it has several.

    Neither ever moves: recordings know where they are.
    """

    def __init__(self) -> None:
        self.count = 0
        """Micro-batches of this step so far."""
        self.forget_places()

    def forget_places(self) -> None:
        self.newest: list[Tensor | None] | None = None
        """Per parameter; None for one that gets no gradient."""
        self.sums: list[Tensor | None] | None = None
        self._recorded: tuple[Recording, Recording] | None = None

    def make_room(self) -> None:
        """Moves the first micro-batch's gradients out of the way of the second's."""
        if self.count == 1:
            if self.sums is None:
                assert self.newest is not None
                self.sums = [None if g is None else torch.empty_like(g) for g in self.newest]
            if self._recorded is None:
                self._copy_to_sums()
            else:
                self._recorded[0].replay()

    def add(self, lane: Lane | None) -> None:
        """Counts the newest in; ``lane`` is where to record that, if it can be recorded."""
        self.count += 1
        if self.count == 1:
            return
        if self._recorded is not None:
            self._recorded[1].replay()
            return
        self._add_to_sums()
        if lane is not None:
            self._recorded = (
                lane.record(self._copy_to_sums)[0],
                lane.record(self._add_to_sums)[0],
            )

    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Puts them where optimizers look for gradients."""
        if self.newest is not None:
            places = self.sums if self.count > 1 else self.newest
            assert places is not None
            for parameter, place in zip(parameters, places, strict=True):
                parameter.grad = place if self.count else None

    def _copy_to_sums(self) -> None:
        copy_all(without_none(self.sums), without_none(self.newest))

    def _add_to_sums(self) -> None:
        if sums := without_none(self.sums):
            torch._foreach_add_(sums, without_none(self.newest))


class RecordedUpdate:
    """An update as a recording, made once its numbers have stayed the same.

    A learning rate that changes with every update can still be recorded if it is a tensor on the
    device: then the number that is built in is its place.
    """

    def __init__(self) -> None:
        self.possible = True
        """Until something in it turns out not to be."""
        self._changes = 0
        self.forget()

    def forget(self) -> None:
        self.latest: tuple[Numbers, Recording] | None = None
        self._last: Numbers | None = None

    def recording(
        self, numbers: Numbers, optimizers: Sequence[Optimizer], record: Callable[[], Recording]
    ) -> Recording | None:
        """The one for these numbers; None if this update has to run unrecorded."""
        if self.latest is not None and self.latest[0] == numbers:
            return self.latest[1]
        same = numbers == self._last
        self.latest, self._last = None, numbers
        self._changes = 0 if same else self._changes + 1
        if self._changes == _PATIENCE:
            _say_unrecorded("its numbers (the learning rate, say) change with every update")
        if not same:
            return None
        counting = next((o for o in optimizers if not counts_on_device(o)), None)
        if counting is not None:
            self._give_up(f"{type(counting).__name__} counts its steps on the CPU")
            return None
        try:
            self.latest = numbers, record()
        except NotRecordable as error:
            self._give_up(str(error))
            return None
        return self.latest[1]

    def _give_up(self, reason: str) -> None:
        self.possible = False
        _say_unrecorded(reason)


def numbers_of(optimizers: Iterable[Optimizer]) -> list[list[Any]]:
    """All that an optimizer's step has built in."""
    return [
        [_built_in(value) for value in group.values()]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _built_in(value: Any) -> Any:
    """A number, or the place of one that is on the device; on the CPU it may change in place."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" and value.numel() == 1 else id(value)


def counts_on_device(optimizer: Optimizer) -> bool:
    by_itself = type(optimizer) in _COUNT_NOTHING
    return all(group.get("capturable", by_itself) for group in optimizer.param_groups)


def _say_unrecorded(reason: str) -> None:
    warnings.warn(
        f"updates run unrecorded, because {reason}. What can be"
        " recorded: numbers that stay, or a learning rate that is a tensor on the device with"
        " fused=True (SGD) or capturable=True (Adam, AdamW).",
        stacklevel=2,
    )


def copy_all(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """As few kernels as can be, where there is something to copy at all."""
    if found := list(places):
        with torch.no_grad():
            torch._foreach_copy_(found, list(values))


def without_none(values: Sequence[Tensor | None] | None) -> list[Tensor]:
    return [value for value in values or () if value is not None]
