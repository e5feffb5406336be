"""What a method is: a paper's order of work, and the weights its backward pass uses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from offbeat.errors import ConfigurationError, unknown
from offbeat.schedules.schedule import Schedule, stagger

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
    asynchronous: ClassVar[bool] = False
    """Whether stages go on while gradients are on their way. One stage alone has none to await."""
    local_losses: ClassVar[bool] = False
    """Whether every stage but the last learns from a loss of its own, through a head."""

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

    @property
    def head_factory(self) -> Callable[[Any, Any], Any] | None:
        """``factory(activation, output)`` builds a stage's head; None for the usual one."""
        return None

    @abstractmethod
    def schedule(self, stages: int) -> Schedule:
        """The order of work for this many stages."""

    def lags(self, stages: int) -> tuple[int, ...]:
        """The lag per stage in updates, as the paper claims it; the schedule must read the same."""
        return (0,) * stages

    def phases(self) -> Sequence[tuple["Method", int | None]]:
        """The methods to run one after the other, each with its number of updates."""
        return ((self, None),)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Method):
    """A method whose stages go on while gradients are on their way.

    ``accumulate=M`` splits every batch into M micro-batches and updates once per batch (None: as
    many as there are stages); ``backward`` overrides the paper's rule, for ablation; ``cap`` bounds
    the micro-batches in flight at the first stage, and those of the others in proportion: less lag
    and less slack. ``cap=K-1`` is the least that keeps every stage busy if messages take no time.
    """

    asynchronous = True
    in_flight_per_hop: ClassVar[int]
    """Micro-batches in flight per hop to the last stage. One keeps every stage busy if messages
    take no time; two, one each way, free forward, backward and update from each other."""
    lockstep: ClassVar[bool] = False
    """Whether no stage begins a step before all have ended the one before (the forward lock)."""

    backward: Rule = field(default="stash", metadata={"help": "the weights a backward sees."})
    accumulate: int | None = field(default=1, metadata={"help": "micro-batches per update."})
    cap: int | None = field(
        default=None, metadata={"help": "most micro-batches in flight at the first stage."}
    )

    def __post_init__(self) -> None:
        if self.backward not in RULES:
            raise unknown("backward rule", self.backward, RULES)
        if self.accumulate is not None:
            require_count("accumulate", self.accumulate, MOST)
        if self.cap is not None and (not isinstance(self.cap, int) or self.cap < 0):
            raise ConfigurationError(
                f"cap={self.cap!r}: give the most micro-batches that may be in flight at the first"
                " stage, a whole number of at least 0, or None for no bound."
            )

    @property
    def rule(self) -> Rule:
        return self.backward

    def depths(self, stages: int) -> tuple[int, ...]:
        """Micro-batches in flight per stage: the papers' m_k."""
        return tuple(self.in_flight_per_hop * (stages - 1 - stage) for stage in range(stages))

    def capped_depths(self, stages: int) -> tuple[int, ...]:
        """What is really kept in flight.

        In proportion, because a hop between stages that hold equally many would have no time at
        all; and depths that do not increase from stage to stage cannot deadlock.
        """
        depths = self.depths(stages)
        if self.cap is None or depths[0] <= self.cap:
            return depths
        return tuple(depth * self.cap // depths[0] for depth in depths)

    def micro_batches(self, stages: int) -> int:
        return stages if self.accumulate is None else self.accumulate

    def schedule(self, stages: int) -> Schedule:
        micro_batches = self.micro_batches(stages)
        return Schedule(
            stagger(self.capped_depths(stages), micro_batches),
            micro_batches,
            lockstep=self.lockstep,
            local_losses=self.local_losses,
        )

    def lags(self, stages: int) -> tuple[int, ...]:
        return tuple(-(-d // self.micro_batches(stages)) for d in self.capped_depths(stages))


MOST = 10_000
"""Micro-batches of a step, and the lag of a stage: beyond, a schedule outgrows the memory."""


def require_count(name: str, value: object, most: int | None = None) -> None:
    """Refuses anything but an integer of at least one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least 1.")
    if most is not None and value > most:
        raise ConfigurationError(f"{name}={value}: give at most {most}.")
