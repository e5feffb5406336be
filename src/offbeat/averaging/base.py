"""What an averaging is: what replicas agree on, how often, how late, and how it is merged."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from offbeat.averaging.outer import Mean, Outer
from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.base import require_count

OptimizerState = Literal["keep", "average", "reset"]
Statistics = Literal["average", "local"]
Compression = Literal["bf16", "int8"]
Fragments = tuple[tuple[str, ...], ...]
"""Per fragment the modules or weights in it, by their names in the unsplit model."""


@dataclass(frozen=True, kw_only=True)
class Averaging(ABC):
    """How replicas of one model are kept together.

    ``warmup``           updates at the start that average gradients, as ``AllReduce`` does; local
                         steps are counted from there.
    ``optimizer_state``  momentum and Adam's moments at a merge: "keep" each replica's own,
                         "average" them with the weights, or "reset" them. None: "average" where a
                         merge in the middle of a round pulls weights back from what they have
                         learnt since its start, because a velocity that is not pulled back with
                         them makes training unstable (docs/replicas.md); else "keep".
    ``statistics``       running statistics (BatchNorm) stay local in training; ``state_dict`` gives
                         their "average", or those of replica 0 ("local").
    ``compress``         send "bf16", or "int8" with one scale per tensor, in place of full numbers;
                         what is rounded off is added to the next message.
    ``exact``            gather, then sum in the order of replicas: one process and many give the
                         same bits. False: an all-reduce, which moves less with many replicas.
    """

    name: ClassVar[str]
    """The name on the command line."""
    title: ClassVar[str]
    """The name in prose."""
    reference: ClassVar[str]

    warmup: int = 0
    optimizer_state: OptimizerState | None = None
    statistics: Statistics = "average"
    compress: Compression | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.warmup, int) or isinstance(self.warmup, bool) or self.warmup < 0:
            raise ConfigurationError(
                f"warmup={self.warmup!r}: give the number of updates that average gradients first,"
                " 0 for none."
            )
        if self.optimizer_state not in (None, *get_args(OptimizerState)):
            raise unknown("optimizer_state", self.optimizer_state, get_args(OptimizerState))
        if self.statistics not in get_args(Statistics):
            raise unknown("statistics", self.statistics, get_args(Statistics))
        if self.compress not in (None, *get_args(Compression)):
            raise unknown("compress", self.compress, get_args(Compression))
        if self.compress is not None and not self.exact:
            raise ConfigurationError(
                f"compress={self.compress!r} with exact=False: messages with scales of their own"
                " cannot be summed on the way, so they are always gathered. Leave one of them out."
            )

    @property
    def bears_missing_replicas(self) -> bool:
        """Whether averages can go on without a replica that died: no sum counts on all of them."""
        return self.exact

    @property
    def state_at_merge(self) -> OptimizerState:
        """What becomes of the optimizers' state, whoever decided it."""
        if self.optimizer_state is not None:
            return self.optimizer_state
        plan = self.plan()
        return "average" if plan is not None and plan.pulls_back else "keep"

    @abstractmethod
    def plan(self) -> "Plan | None":
        """The rule in the engine's terms; None where only gradients are averaged."""

    def averages_gradients(self, update: int) -> bool:
        """Whether this update applies the mean of all replicas' gradients."""
        return self.plan() is None or update < self.warmup


@dataclass(frozen=True)
class Periodic(Averaging):
    """Averages weights after every ``every``-th update: by default all at once, into the mean."""

    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("every", self.every)

    def plan(self) -> "Plan":
        return Plan(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Local steps and merges: ``x <- X + keep (x_sent - X) + progress (x - x_sent)``.

    X is what the ``outer`` rule makes of the average; x_sent is a replica's weights when that
    average was started, ``delay`` of its own updates ago.
    """

    every: int
    """Updates from the start of one average to the start of the next."""
    delay: int = 0
    """Updates from an average's start to its merge."""
    keep: float = 0.0
    """Share of the replica's own deviation that survives a merge: the papers' xi or alpha."""
    progress: float | None = None
    """Share of what was learnt since the start that survives; by default ``keep``."""
    fragments: "int | Fragments" = 1
    """Parts of the model that are averaged in turn: how many runs of blocks, or which modules."""
    offset: int = 0
    """Updates by which every average starts later, or below 0 earlier."""
    outer: Callable[[Tensor, int], Outer] = Mean
    """Called per fragment with the weights that all replicas start from, and their number."""
    partners: Callable[[int, int, int], Collection[int]] | None = None
    """Called with a round, from 0, a replica and the number of replicas: whom this replica averages
    with in this round, itself included. None: all with all."""

    @property
    def kept_progress(self) -> float:
        """The share of what was learnt since an average's start that survives its merge."""
        return self.keep if self.progress is None else self.progress

    @property
    def pulls_back(self) -> bool:
        """Whether merges in the middle of a round take back some of what was learnt in it."""
        return 0 < self.delay < self.every and self.kept_progress < 1

    def members(self, round: int, replica: int, replicas: int) -> set[int]:
        """Whose parts are in a replica's average of this round.

        >>> Plan(every=1).members(0, 2, 4)
        {0, 1, 2, 3}
        """
        everybody = set(range(replicas))
        if self.partners is None:
            return everybody
        members = set(self.partners(round, replica, replicas))
        if replica not in members or not members <= everybody:
            raise ConfigurationError(
                f"partners({round}, {replica}, {replicas}) gives {sorted(members)}: a replica"
                f" averages with itself and with any others from 0 to {replicas - 1}."
            )
        return members

    def starts_at(self, fragment: int) -> int:
        """The update, modulo ``every``, after which a fragment's averages start.

        >>> plan = Plan(every=6, fragments=2, offset=-1)
        >>> plan.starts_at(0), plan.starts_at(1)
        (2, 5)
        """
        parts = self.fragments if isinstance(self.fragments, int) else len(self.fragments)
        return ((fragment + 1) * self.every // parts + self.offset) % self.every


def require_delay(delay: Any, every: int) -> None:
    if not isinstance(delay, int) or isinstance(delay, bool) or not 0 <= delay <= every:
        raise ConfigurationError(
            f"delay={delay!r}: an average is merged before the next one starts, so with"
            f" every={every} give a whole number from 0 to {every}."
        )


def require_offset(offset: Any, every: int) -> None:
    if not isinstance(offset, int) or isinstance(offset, bool) or not -every < offset < every:
        raise ConfigurationError(
            f"offset={offset!r}: the updates by which averages start later than at the end of a"
            f" round, below 0 earlier: with every={every} a whole number from {1 - every} to"
            f" {every - 1}."
        )


def require_share(name: str, value: Any, meaning: str) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise ConfigurationError(f"{name}={value!r}: give a number from 0 to 1, {meaning}.")


def require_positive(name: str, value: Any) -> None:
    if not _is_number(value) or not value > 0:
        raise ConfigurationError(f"{name}={value!r}: give a number above 0.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
