"""The records of a model, and the stages that run their pieces.

Loaded with the first model that is recorded, because torch's compiler comes with it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.cutting.record import Likeness, Piece, Record, record
from offbeat.errors import StageError
from offbeat.nest import Nest


class Records:
    """The records of a model that is divided at these modules; made where one is missing."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self.model = model
        self._paths = list(paths)
        self._modules = list(model.modules())
        self._known: dict[tuple[Any, Likeness], Record] = {}
        self.lent: Callable[[], AbstractContextManager[None]] = nullcontext
        """Lets weights be read that another process trains; of those a record takes no values."""

    def known(self) -> list[Record]:
        return list(self._known.values())

    def forget_all_but(self, known: Sequence[Record]) -> None:
        self._known = {key: record for key, record in self._known.items() if record in known}

    def find(self, batch: Nest) -> Record:
        """One that is right for a batch."""
        like, modes = Likeness.of(batch), self._modes()
        for (their_modes, other), known in self._known.items():
            alike = their_modes == modes and other.structure == like.structure
            if alike and (other == like or known.fits(batch)):
                return known
        return self.find_like(like)

    def find_like(self, like: Likeness) -> Record:
        """The one that was made, or is to be made, for such a batch."""
        key = self._modes(), like
        if key not in self._known:
            tensors = [*self.model.parameters(), *self.model.buffers()]
            device = tensors[0].device if tensors else torch.device("cpu")
            with self.lent(), torch.set_grad_enabled(key[0][0]):
                self._known[key] = record(self.model, self._paths, like, device)
        return self._known[key]

    def _modes(self) -> tuple[bool, ...]:
        """Whether gradients may be asked for, and the mode of each module."""
        modes = [module.training for module in self._modules]
        return any(modes) or torch.is_grad_enabled(), *modes

    def weights_of(self, stage: int) -> list[str]:
        """What a stage uses in the records so far; what none uses is that of the nearest name."""
        users: dict[str, set[int]] = {}
        for known in self._known.values():
            for number, piece in enumerate(known.pieces):
                for name in piece.weights:
                    users.setdefault(name, set()).add(number)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        used = dict(users)
        for name, _ in named:
            if name not in users:
                near = max(used, key=lambda other: _steps_together(name, other), default=None)
                users[name] = {0} if near is None else {max(used[near])}
        return [name for name, _ in named if stage in users[name]]


def _steps_together(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


class RecordedStage(nn.Module):
    """The pieces that one stage has in all records, over the same weights."""

    def __init__(self, records: Records, number: int) -> None:
        super().__init__()
        self.weights = nn.Module()
        self._records, self._number = records, number
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name in records.weights_of(number):
            self._hold(name)

    def _hold(self, name: str) -> None:
        """The model's own tensor under the model's own name."""
        path, _, key = name.rpartition(".")
        source = self._records.model.get_submodule(path)
        owner = self.weights
        for part in path.split(".") if path else ():
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        tensor = getattr(source, key)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(key, tensor)
        else:
            owner.register_buffer(key, tensor)
        self._owners[name] = owner, key

    def forward(self, given: Nest) -> Nest:
        found, values = self._begin(given)
        piece = found.pieces[self._number]
        return self._end(found, {**values, **piece(self._weights_for(piece), values)})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, given: Nest) -> tuple[Record, dict[str, Any]]:
        if self._number > 0:
            return self._records.find_like(Likeness(*given["like"])), given["values"]
        found = self._records.find(given)
        return found, dict(zip(found.inputs, nest.tensors(given), strict=True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, found: Record, values: dict[str, Any]) -> Nest:
        if self._number == len(found.pieces) - 1:
            results = iter(found.results)
            return nest.replace(found.output, lambda _: values[next(results)])
        needed = found.needed_after(self._number)
        like = found.like.structure, found.like.shapes
        return {"like": like, "values": {n: v for n, v in values.items() if n in needed}}

    def _weights_for(self, piece: Piece) -> list[Tensor]:
        for name in piece.weights:
            if name not in self._owners:
                raise StageError(
                    f"stage {self._number} uses {name!r} for this batch, and in the batches before"
                    " it was another stage's: a stage trains its own weights only. Pass a list of"
                    " modules, one per stage."
                )
        places = (self._owners[name] for name in piece.weights)
        return [getattr(owner, key) for owner, key in places]
