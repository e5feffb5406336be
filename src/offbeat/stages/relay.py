"""Weights that several stages use: the first of them owns each, the others get what it has read.

A weight's values travel on from its owner with every micro-batch, as part of what the next stage is
given, and its gradient comes back as that of an input: every stage adds its own to what arrives,
the last use first, as autograd does in one piece.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import StageError
from offbeat.nest import Bundle, Nest
from offbeat.stages.versions import nodes_of


class Relay(nn.Module):
    """A stage's module between those that share weights with it.

    What belongs to an earlier stage is no parameter of this one: forwards are lent its values.
    """

    def __init__(
        self, module: nn.Module, ties: Mapping[str, nn.Parameter], owned: Sequence[str],
        arriving: Sequence[str], leaving: Sequence[str],
    ) -> None:  # fmt: skip
        """``ties``: what this stage uses of the shared weights; the others are names among all."""
        super().__init__()
        self.module = module
        self.owned, self._leaving = list(owned), list(leaving)
        """The names of those that belong to this stage."""
        self._receives = bool(arriving)
        self._borrowed = {name: tie for name, tie in ties.items() if name not in owned}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {
            name: [
                (inner, key)
                for inner in module.modules()
                for key, parameter in weights_of(inner).items()
                if parameter is tie
            ]
            for name, tie in ties.items()
        }
        self._looked = False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        borrowed = list(self._borrowed.values())
        for name, parameter in super().named_parameters(*args, **kwargs):
            if not any(parameter is one for one in borrowed):
                yield name, parameter

    def own_weights(self) -> list[nn.Parameter]:
        """Those that later stages use, too."""
        places = [self._places[name][0] for name in self.owned]
        return [weights_of(module)[key] for module, key in places]

    def forward(self, given: Nest) -> Nest:
        return self.run(self.module, given)

    def run(self, module: Any, given: Nest) -> Nest:
        """``module``: what to call, this stage's own or one compiled from it."""
        ties: dict[str, Tensor] = {}
        if self._receives:
            given, ties = given
        ties = ties | dict(zip(self.owned, self.own_weights(), strict=True))
        before = _writes(ties)
        with self._lent(ties):
            output = module(given)
        if torch.is_grad_enabled():
            self._refuse_other_uses(output, _writes(ties) != before)
        return Bundle(output, {n: ties[n] for n in self._leaving}) if self._leaving else output

    def lent(self, given: Nest) -> AbstractContextManager[None]:
        """As a forward that was ``given`` this is."""
        return self._lent(given[1]) if self._receives else nullcontext()

    @contextmanager
    def _lent(self, ties: Mapping[str, Tensor]) -> Iterator[None]:
        places = [(name, *place) for name in self._borrowed for place in self._places[name]]
        own = [weights_of(module)[key] for _, module, key in places]
        try:
            for name, module, key in places:
                weights_of(module)[key] = ties[name]
            yield
        finally:
            for (_, module, key), parameter in zip(places, own, strict=True):
                weights_of(module)[key] = parameter

    def _refuse_other_uses(self, output: Nest, written: bool) -> None:
        """Refuses what lending cannot do: writes, and weights reached by another way."""
        if written:
            raise StageError(
                f"a forward writes into a weight that several stages use ({self._names}), as an"
                " nn.Embedding with max_norm does, and the others would not see it. Leave that out,"
                " or give each stage a weight of its own: offbeat.untie(model)."
            )
        if self._looked:
            return
        self._looked = True
        borrowed = {id(parameter): name for name, parameter in self._borrowed.items()}
        for node in nodes_of(nest.tensors(output)):
            name = borrowed.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise StageError(
                    f"{name!r} belongs to an earlier stage, and a module of this one keeps a"
                    " reference of its own to it, as an nn.LSTM does, so that it would see other"
                    " values. Give each stage a weight of its own: offbeat.untie(model)."
                )

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._places))


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Where its forward looks for them."""
    found: dict[str, Any] = vars(module)["_parameters"]
    return found


def _writes(ties: Mapping[str, Tensor]) -> list[int]:
    """How often each has been written in place."""
    return [tie._version for tie in ties.values()]
