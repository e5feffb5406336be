"""What a correction is: a small change to forward weights, gradients or steps, by lag."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from offbeat.corrections.groups import Group, Tensors
from offbeat.errors import ConfigurationError
from offbeat.methods.base import Rule

Numbers = Sequence[float | Tensor]
"""What a hook needs from the host, which may change from update to update. What depends on a rate
that is kept on a GPU is a tensor there."""


@dataclass(frozen=True)
class Moment:
    """When a hook acts."""

    lag: int
    """Updates between the forward of a micro-batch and the application of its gradient; where an
    update applies several micro-batches, the largest."""
    update: int
    """How many updates the stage has made."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The stage a hook works in, as far as it may look."""

    stage: int
    stages: int
    lag: int
    """The stage's largest lag, once the pipe is full."""
    parameters: tuple[nn.Parameter, ...]
    """Those that train."""
    groups: Sequence[Group] = field(default=())


@dataclass(frozen=True)
class Correction(ABC):
    """A cure for staleness: settings here, memory in the hooks that a stage makes from it.

    It is told the lag and never asked for it. A stage without lag makes no hooks, so there every
    correction is the identity, bit for bit.
    """

    name: ClassVar[str]
    """The name on the command line."""
    title: ClassVar[str]
    """The name in prose."""
    acts_on: ClassVar[str]
    """Which of the stage's steps it changes."""
    memory: ClassVar[str]
    """Extra copies of the stage's weights, D being its lag."""
    reference: ClassVar[str]

    @property
    def shrinkage(self) -> float:
        """Factor on the gradients that arrive at a stage with lag."""
        return 1.0

    def check_rule(self, rule: Rule, *, reads_old_versions: bool) -> None:
        """Refuses a method under which the correction would mean nothing.

        Raises with the reason and a way out; the trainer puts the method's name before it.
        """
        del rule, reads_old_versions

    @abstractmethod
    def hook(self, around: Surroundings) -> "Hook":
        """The correction at work in one stage."""


class Hook:
    """A correction at work in one stage; every point where it may act, doing nothing by default.

    ``numbers`` runs on the host before a hook acts. The rest is tensor operations alone: nothing is
    read back, and what a hook remembers is allocated once and written in place, so that a GPU
    engine can record it.
    """

    needs_read = False
    """Whether ``gradients`` wants the weights that the forward used."""
    needs_before = False
    """Whether ``after_step`` or ``observe`` wants the weights before the step."""
    repeats = False
    """Whether updates of one lag and learning rate are the same work each time, so that one of them
    can be recorded and replayed."""

    def rate(self, moment: Moment) -> float:
        """Factor on the learning rate."""
        return 1.0

    def momentum(self, moment: Moment, momentum: float) -> float:
        """The momentum of a step in place of the optimizer's own."""
        return momentum

    def numbers(self, moment: Moment) -> Numbers:
        """What the next call needs to know from the host."""
        return ()

    def forward_weights(self, numbers: Numbers) -> Tensors | None:
        """Weights to go forward with; None for the stage's own."""
        return None

    def backward_weights(self, behind: int) -> Tensors | None:
        """Weights for the backward of a micro-batch that read those of ``behind`` updates ago."""
        return None

    def gradients(self, numbers: Numbers, read: Tensors | None) -> None:
        """Changes the gathered gradients in place."""

    def before_step(self, numbers: Numbers) -> None:
        """Looks at gradients and weights before the optimizer's step."""

    def after_step(self, numbers: Numbers, before: Tensors | None) -> None:
        """Changes the step the optimizer has just made, in place."""

    def observe(self, before: Tensors | None) -> None:
        """Looks at the weights once an update, learning rate included, is complete."""

    def memory(self) -> dict[str, Tensors]:
        """The tensors the hook remembers between updates: what a checkpoint saves."""
        return {}


def require_number(
    owner: str, name: str, value: object, *, above: float, most: float = math.inf
) -> None:
    """Refuses what is not a number in (above, most]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not above < value <= most:  # type: ignore[operator]
        bound = "" if most == math.inf else f" and at most {most:g}"
        raise ConfigurationError(
            f"{owner}({name}={value!r}): give a number above {above:g}{bound}."
        )
