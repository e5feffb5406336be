"""What a method is: a paper's order of work, and the weights its backward pass uses."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from offbeat.errors import ConfigurationError, unknown
from offbeat.schedule import Schedule, staggered

Rule = Literal["stash", "current", "recompute"]
"""Which weights a backward pass sees:

``stash``      the ones its forward read: the exact gradient at an old point;
``current``    the newest, with the old activations: no weight copies;
``recompute``  the newest, with activations computed again from the stored input.
"""
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Method(ABC):
    """A way to train: it emits a :class:`Schedule` for any number of stages."""

    name: ClassVar[str]
    """The name on the command line."""
    title: ClassVar[str]
    """The name in prose."""
    lag_formula: ClassVar[str]
    """Lag of stage k of K, in updates (micro-batches divided by M where the method has them)."""
    copies: ClassVar[str]
    """Weight copies a stage holds."""
    waits_for: ClassVar[str]
    """The locks that are left: what a stage has to wait for."""
    reference: ClassVar[str]

    @property
    def shrink(self) -> float:
        """Factor on every gradient that arrives from the next stage."""
        return 1.0

    @property
    def sums_gradients(self) -> bool:
        """Whether the gradients of a step's micro-batches are summed instead of averaged."""
        return False

    @property
    def rule(self) -> Rule:
        """Which weights the backward pass sees. Without lag all rules are one."""
        return "stash"

    @abstractmethod
    def schedule(self, stages: int) -> Schedule:
        """The order of work for this many stages."""

    @abstractmethod
    def lags(self, stages: int) -> tuple[int, ...]:
        """The lag per stage in updates, as the paper claims it; the schedule must read the same."""

    def phases(self) -> Sequence[tuple["Method", int | None]]:
        """The methods to run one after the other, each with its number of updates."""
        return ((self, None),)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Method):
    """A method whose stages go on while gradients are on their way.

    ``accumulate=M`` splits every batch into M micro-batches and updates once per batch (None: as
    many as there are stages); ``backward`` overrides the paper's rule, for ablation.
    """

    backward: Rule = "stash"
    accumulate: int | None = 1

    def __post_init__(self) -> None:
        if self.backward not in RULES:
            raise unknown("backward rule", self.backward, RULES)
        if self.accumulate is not None:
            require_count("accumulate", self.accumulate, MOST)

    @property
    def rule(self) -> Rule:
        return self.backward

    @abstractmethod
    def depths(self, stages: int) -> tuple[int, ...]:
        """Micro-batches in flight per stage: the papers' m_k."""

    def micro_batches(self, stages: int) -> int:
        return stages if self.accumulate is None else self.accumulate

    def schedule(self, stages: int) -> Schedule:
        micro_batches = self.micro_batches(stages)
        return Schedule(staggered(self.depths(stages), micro_batches), micro_batches)

    def lags(self, stages: int) -> tuple[int, ...]:
        return tuple(-(-depth // self.micro_batches(stages)) for depth in self.depths(stages))


MOST = 10_000
"""Micro-batches of a step, and the lag of a stage: beyond, a schedule outgrows the memory."""


def require_count(name: str, value: object, most: int | None = None) -> None:
    """Refuses anything but an integer of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least 1.")
    if most is not None and value > most:
        raise ConfigurationError(f"{name}={value}: give at most {most}.")


def unlocked(stages: int) -> tuple[int, ...]:
    """``2(K-1-k)``: one tick per hop each way, which frees forward, backward and update."""
    return tuple(2 * (stages - 1 - stage) for stage in range(stages))
