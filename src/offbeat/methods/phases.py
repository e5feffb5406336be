"""Phases: one method after the other, with a drain in between."""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.errors import ConfigurationError
from offbeat.methods.base import Method, Rule
from offbeat.schedules.schedule import Schedule


@dataclass(frozen=True, init=False)
class Phases(Method):
    """Runs methods one after the other; between two of them the pipeline is drained.

    ``Phases((StaleWeights(), 20_000), (Synchronous(), None))`` is the hybrid scheme of the
    StaleWeights paper; a synchronous warm-up is the same thing the other way round. Counts are
    updates; the last phase has none, it goes on. Weights, optimizer state and learning-rate
    schedules carry on.

    >>> from offbeat.methods import StaleWeights, Synchronous
    >>> Phases((StaleWeights(), 100), (Synchronous(), None)).lags(3)
    (4, 2, 0)
    """

    name = "phases"
    title = "Phases"

    parts: tuple[tuple[Method, int | None], ...]

    def __init__(self, *parts: tuple[Method, int | None]) -> None:
        if not parts:
            raise ConfigurationError(
                "Phases() is empty: give (method, updates) pairs, the last with None."
            )
        for place, part in enumerate(parts):
            _check(part, last=place == len(parts) - 1)
        object.__setattr__(self, "parts", tuple(parts))

    def phases(self) -> Sequence[tuple[Method, int | None]]:
        return self.parts

    @property
    def rule(self) -> Rule:
        return self.parts[0][0].rule

    def schedule(self, stages: int) -> Schedule:
        """The schedule of the first phase; a trainer asks each phase for its own."""
        return self.parts[0][0].schedule(stages)

    def lags(self, stages: int) -> tuple[int, ...]:
        return self.parts[0][0].lags(stages)


def _check(part: object, *, last: bool) -> None:
    if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[0], Method):
        raise ConfigurationError(
            f"Phases: {part!r} is not a (method, updates) pair, as (StaleWeights(), 20_000)."
        )
    method, updates = part
    if isinstance(method, Phases):
        raise ConfigurationError("Phases inside Phases: write the inner pairs into the outer one.")
    if last and updates is not None:
        raise ConfigurationError(
            f"Phases: the last phase, {method}, goes on for ever: give None instead of {updates!r}."
        )
    if not last and (not isinstance(updates, int) or isinstance(updates, bool) or updates < 1):
        raise ConfigurationError(
            f"Phases: {method} runs for {updates!r} updates: give a whole number of at least 1;"
            " None is for the last phase."
        )
