"""Stages as they are given: a list of modules, or a model in one piece."""

from collections.abc import Sequence
from inspect import signature

from torch import nn

from offbeat.cutting.cut import Cut, Wish
from offbeat.errors import ConfigurationError
from offbeat.stages.trial import Whole


class GivenCut(Cut):
    @classmethod
    def plan(cls, wish: Wish) -> "GivenCut | None":
        model = wish.model
        if isinstance(model, nn.Module):
            if wish.count > 1:
                return None
            several = len(signature(model.forward).parameters) > 1
            return cls(
                model=model, stages=1, places=(), modules=(Whole(model) if several else model,)
            )
        if isinstance(model, type):
            name = model.__name__
            raise ConfigurationError(f"{name} is a class: give what it makes, {name}(...).")
        listed = isinstance(model, Sequence) and not isinstance(model, str)
        if not listed or not all(isinstance(m, nn.Module) for m in model):
            raise ConfigurationError(f"{model!r}: give an nn.Module or a list of them.")
        if not model:
            raise ConfigurationError("an empty list of stages: give at least one nn.Module.")
        if wish.cuts is not None or wish.ppv is not None:
            raise ConfigurationError(
                f"a list of {len(model)} modules is cut already: leave out cuts and ppv, or pass"
                " one nn.Sequential."
            )
        if wish.stages not in (None, len(model)):
            raise ConfigurationError(
                f"stages={wish.stages}, but the list has {len(model)} modules, which are the"
                " stages: leave out stages."
            )
        return cls(model=nn.Sequential(*model), stages=len(model), places=(), modules=tuple(model))
