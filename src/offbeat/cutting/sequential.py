"""An ``nn.Sequential``, cut between its children: by their numbers, names, weights or costs."""

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import nn
from torch.nn.modules.conv import _ConvNd

from offbeat.cutting.cut import Balance, Cut, Wish, check_places
from offbeat.cutting.sharing import Sharing
from offbeat.errors import ConfigurationError, unknown
from offbeat.nest import Nest
from offbeat.stages.attributes import HOOKS, Change


class SequentialCut(Cut):
    @classmethod
    def plan(cls, wish: Wish) -> "SequentialCut | None":
        model = wish.model
        # A subclass with a forward of its own is no chain of its children.
        chain = getattr(type(model), "forward", None) is nn.Sequential.forward
        if not chain or not isinstance(model, nn.Sequential) or "forward" in vars(model):
            if wish.ppv is not None:
                raise ConfigurationError(
                    f"ppv counts the layers of an nn.Sequential, and this is a"
                    f" {type(model).__name__}: give stages=, or cuts= with the paths of the blocks"
                    " at which stages begin."
                )
            return None
        if any(vars(model)[f"_{kind}_hooks"] for kind in ("forward", "forward_pre", "backward")):
            warnings.warn(
                "hooks of the model itself are not called: stages call its layers. Register them on"
                " layers.",
                stacklevel=4,
            )
        layers = list(_layers_of(model).values())
        if wish.count > len(layers):
            raise ConfigurationError(
                f"{wish.count} stages, but the model has {len(layers)} layers (children of its"
                f" nn.Sequential): give at most {len(layers)} stages."
            )
        cut = cls(model=model, stages=wish.count, places=None)
        if wish.cuts is not None:
            names = list(_layers_of(model))
            for name in wish.cuts:  # a cut may also be the name of a child
                if isinstance(name, str) and name not in names:
                    raise unknown("child to cut at", name, names)
            numbers = [names.index(c) if isinstance(c, str) else c for c in wish.cuts]
            return cut.at(check_places(numbers, len(layers)))
        if wish.ppv is not None:
            return cut.at(check_places(_place_layers(layers, wish.ppv), len(layers)))
        Sharing.among(model, layers).refuse_means("layers")  # wherever the cuts will be
        return cut

    def make(self, batch: Nest, balance: Balance) -> "SequentialCut":
        return self.at(balance(list(_layers_of(self.model).values()), batch, self.stages))

    def follow(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.module is self.model and (change.name == "forward" or change.part in HOOKS):
                what = "forward" if change.name == "forward" else "a hook"
                raise ConfigurationError(
                    f"{what} was put on the {type(self.model).__name__} itself after this trainer"
                    " began: stages call its layers, not it. Put it on layers, or build a new"
                    " Trainer. The batch was not started."
                )

    def at(self, places: Sequence[int]) -> "SequentialCut":
        """The same cut with its stages, of which the later ones begin at these children."""
        layers = list(_layers_of(self.model).items())
        ends = pairwise([0, *places, len(layers)])
        modules = tuple(nn.Sequential(OrderedDict(layers[start:end])) for start, end in ends)
        return replace(self, places=tuple(places), modules=modules)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of an nn.Sequential as it runs them: children() would drop repeated ones."""
    every = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in every if name and "." not in name}


def _place_layers(children: Sequence[nn.Module], ppv: Sequence[int]) -> list[int]:
    """Child numbers for a pipeline placement vector, which counts weighted layers.

    Layers without weights (activation, pooling, normalisation) stay with the weighted one before.
    """
    counts = [
        sum(isinstance(module, (_ConvNd, nn.Linear)) for module in child.modules())
        for child in children
    ]
    begins: dict[int, int] = {}  # weighted layers before a child that has some: that child
    total = 0
    for place, count in enumerate(counts):
        if count:
            begins[total] = place
            total += count
    begins.pop(0, None)
    for layer in ppv:
        if layer not in begins:
            raise ConfigurationError(
                f"ppv={tuple(ppv)}: no stage can end after weighted layer {layer}. Of this model's"
                f" {total} conv and linear layers a stage can end after"
                f" {', '.join(map(str, begins))}."
            )
    if list(ppv) != sorted(set(ppv)):
        raise ConfigurationError(f"ppv={tuple(ppv)}: the layers must rise.")
    return [begins[layer] for layer in ppv]
