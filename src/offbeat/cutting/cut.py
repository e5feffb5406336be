"""What every way to cut a model answers. The ways are files of this folder, listed in ``ways``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from offbeat.cutting.absent import Absent
from offbeat.cutting.costs import cut_by_count
from offbeat.cutting.sharing import Sharing, share
from offbeat.errors import ConfigurationError
from offbeat.methods.base import require_count
from offbeat.nest import Nest
from offbeat.stages.attributes import Change

Model = nn.Module | Sequence[nn.Module]
Cuts = Sequence[int] | Sequence[str]
Balance = Callable[[Sequence[nn.Module], Nest, int], list[int]]
"""Where stages begin, for modules that run one after the other, a batch and a number of stages."""


@dataclass(frozen=True)
class Wish:
    """What a user says about a cut."""

    model: Model
    stages: int | None = None
    cuts: Cuts | None = None
    ppv: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.cuts is not None and self.ppv is not None:
            raise ConfigurationError("cuts and ppv both say where to cut: give one of them.")
        _require_list("cuts", self.cuts, int | str)
        _require_list("ppv", self.ppv, int)
        if self.stages is not None:
            require_count("stages", self.stages)
        if self.stages not in (None, self.count):
            name, places = ("ppv", self.ppv) if self.cuts is None else ("cuts", self.cuts)
            raise ConfigurationError(
                f"stages={self.stages} and {name}={list(places or ())} disagree: {self.count - 1}"
                f" cuts make {self.count} stages. Leave out one of the two."
            )

    @property
    def count(self) -> int:
        """The number of stages."""
        places = self.ppv if self.cuts is None else self.cuts
        return self.stages or 1 if places is None else len(places) + 1


@dataclass(frozen=True, kw_only=True)
class Cut(ABC):
    """How one model becomes stages."""

    model: nn.Module
    """The unsplit model; the stages share its parameters, so it always holds the newest."""
    stages: int
    places: tuple[int, ...] | tuple[str, ...] | None
    """Where stages begin: children, blocks or paths; None until a batch has decided it."""
    modules: tuple[nn.Module, ...] = ()
    """The stages; none until they are made, which may need a batch."""
    costs: tuple[float, ...] | None = None
    """Arithmetic of each on the first batch, where making them has counted it."""

    absent: Absent | None = None
    """What has no values, where the model was built on meta; lent random ones to be cut."""

    @classmethod
    @abstractmethod
    def plan(cls, wish: Wish) -> "Cut | None":
        """The cut that is wished for, as far as it is known without data.

        None if this way is not for such a model: the next way in the list is asked then.
        """

    @property
    def needs_batch(self) -> bool:
        """Whether the stages can be made only once a batch has been seen."""
        return not self.modules

    def decide(self, batch: Nest, balance: Balance = cut_by_count) -> "Cut":
        """The same cut with its stages made. ``balance`` chooses the places that nobody gave."""
        if not self.needs_batch:
            return self
        return self._make_somehow(batch, balance).with_ties()

    def _make_somehow(self, batch: Nest, balance: Balance) -> "Cut":
        try:
            return self.make(batch, balance)
        except ConfigurationError as error:
            other = self.otherwise()
            if other is None:
                raise
            try:
                return other.make(batch, balance)
            except ConfigurationError as again:
                words = f"{error} Nor can it be recorded and divided: {again}"
                raise ConfigurationError(words) from again

    def make(self, batch: Nest, balance: Balance) -> "Cut":
        """What ``decide`` does in ways that cannot make the stages without a batch."""
        raise NotImplementedError

    def with_ties(self) -> Self:
        """The same cut, in which stages that share weights pass them on to each other."""
        self.sharing().refuse_means()
        return replace(self, modules=share(self.model, self.modules))

    def sharing(self) -> Sharing:
        """Which stages use each parameter and buffer."""
        return Sharing.among(self.model, self.modules)

    def copy(self) -> Self:
        """The same cut of a copy of the model."""
        return deepcopy(self)

    def norm_order(self) -> list[int] | None:
        """Where each trained parameter of the model, in its order, comes among the stages'.

        None if the orders are the same, as they are unless a model registers its modules otherwise
        than it runs them.
        """
        place = {id(p): number for number, p in enumerate(self.model.parameters())}
        places = [place[id(p)] for m in self.modules for p in m.parameters() if p.requires_grad]
        order = sorted(range(len(places)), key=places.__getitem__)
        return None if order == list(range(len(places))) else order

    def follow(self, changes: Sequence[Change]) -> None:  # noqa: B027
        """Lets the stages follow what a script has changed of the model, or refuses it."""

    # A way that may find no stages, whose stages have to prepare for a batch, or whose parts do not
    # run alone, overrides these.

    def otherwise(self) -> "Cut | None":
        """Another cut, to be made where this one turns out not to be for the model."""
        return None

    def check_batch(self, inputs: Sequence[Nest], micro_batches: int) -> None:  # noqa: B027
        """Prepares for inputs, one per replica, in so many parts, or refuses them."""

    @property
    def needs_values(self) -> bool:
        """Whether weights of all stages are read later, too."""
        return False

    def trust(self, lent: Callable[[], AbstractContextManager[None]]) -> None:  # noqa: B027
        """Says how to run what other processes hold, at some values."""

    def check_timing(self) -> None:  # noqa: B027
        """Refuses ``balance="measured"`` if the parts of this model cannot be timed alone."""


def check_places(cuts: Sequence[Any], layers: int) -> tuple[int, ...]:
    """The numbers of the layers at which stages begin, if they can be that."""
    whole = all(isinstance(cut, int) and 0 < cut < layers for cut in cuts)
    if not whole or list(cuts) != sorted(set(cuts)):
        raise ConfigurationError(
            f"cuts={list(cuts)}: each is the child at which the next stage begins, so they rise and"
            f" lie between 1 and {layers - 1} for {layers} children."
        )
    return tuple(cuts)


def _require_list(name: str, places: Any, kind: Any) -> None:
    sequence = isinstance(places, Sequence) and not isinstance(places, str)
    if places is not None and not (
        sequence and all(isinstance(p, kind) and not isinstance(p, bool) for p in places)
    ):
        raise ConfigurationError(
            f"{name}={places!r}: give a list of the places to cut at, as in {name}=[4, 9]."
        )
