"""Models that need no cut: a list of modules, which are the stages, or a model in one piece."""

from inspect import signature

from torch import nn

from offbeat.cutting.cut import Cut, Wish
from offbeat.errors import ConfigurationError
from offbeat.stages.trial import Whole


class GivenCut(Cut):
    """A list of modules, one per stage."""

    @classmethod
    def plan(cls, wish: Wish) -> "GivenCut | None":
        modules = wish.model
        if isinstance(modules, nn.Module):
            return None
        if isinstance(modules, str) or not all(isinstance(m, nn.Module) for m in modules):
            raise ConfigurationError(f"{modules!r}: give an nn.Module or a list of them.")
        if not modules:
            raise ConfigurationError("an empty list of stages: give at least one nn.Module.")
        if wish.cuts is not None or wish.ppv is not None:
            raise ConfigurationError(
                f"a list of {len(modules)} modules is cut already: leave out cuts and ppv, or pass"
                " one nn.Sequential."
            )
        if wish.stages not in (None, len(modules)):
            raise ConfigurationError(
                f"stages={wish.stages}, but the list has {len(modules)} modules, which are the"
                " stages: leave out stages."
            )
        return cls(
            model=nn.Sequential(*modules), stages=len(modules), places=(), modules=tuple(modules)
        )


class WholeCut(Cut):
    """A model in one stage."""

    @classmethod
    def plan(cls, wish: Wish) -> "WholeCut | None":
        if not isinstance(wish.model, nn.Module) or wish.count > 1:
            return None
        several = len(signature(wish.model.forward).parameters) > 1
        module = Whole(wish.model) if several else wish.model
        return cls(model=wish.model, stages=1, places=(), modules=(module,))
