"""A smaller learning rate where gradients are older."""

from dataclasses import dataclass

from offbeat.corrections.base import Correction, Hook, Moment, Surroundings, require_number
from offbeat.errors import ConfigurationError


@dataclass(frozen=True)
class RateByLag(Correction):
    """The learning rate of an update is divided by ``(D + plus)**p``, and by 1 at least.

    p is ``power``, or with ``anneal=N`` falls from it to 0 over the first N updates.
    ``RateByLag(plus=0, anneal=N)`` is PipeMare's first technique. Costs nothing; the base rate may
    have to be tuned again.
    """

    name = "rate-by-lag"
    title = "Learning rate by lag"
    acts_on = "learning rate"
    memory = "0"
    reference = "Yang et al. 2021, arXiv 1910.05124"

    power: float = 1.0
    anneal: int | None = None
    plus: int = 1

    def __post_init__(self) -> None:
        require_number("RateByLag", "power", self.power, above=0)
        if self.plus not in (0, 1):
            raise ConfigurationError(
                f"RateByLag(plus={self.plus!r}): give 1 for lr / (1 + lag), 0 for lr / lag."
            )
        if self.anneal is not None:
            require_number("RateByLag", "anneal", self.anneal, above=0)

    def hook(self, around: Surroundings) -> "_Rate":
        return _Rate(self)


class _Rate(Hook):
    def __init__(self, settings: RateByLag) -> None:
        self._settings = settings
        self.repeats = settings.anneal is None

    def rate(self, moment: Moment) -> float:
        power = self._settings.power
        if self._settings.anneal is not None:
            power *= 1 - min(moment.update / self._settings.anneal, 1.0)
        return float(max(1.0, moment.lag + self._settings.plus) ** -power) if moment.lag else 1.0
