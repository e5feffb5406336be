"""FDG: fully decoupled, with gradients that shrink on their way down."""

from dataclasses import dataclass, field

from offbeat.errors import ConfigurationError
from offbeat.methods.base import Asynchronous


@dataclass(frozen=True)
class FDG(Asynchronous):
    """All three locks gone; stashed weights; every hop scales the gradient by ``beta``.

    Update: as PipeDream with twice the lag, the gradient that arrives at stage k multiplied by
    ``beta`` in every stage but the last, so it compounds to ``beta**(K-1-k)``. ``beta=1`` is off.
    Lag: ``2(K-1-k)``. Memory: lag + 1 weight copies, as many graphs.
    Reference: Zhuang et al., "Fully Decoupled Neural Network Learning Using Delayed Gradients".

    >>> FDG(beta=0.5).schedule(3).lags
    (4, 2, 0)
    """

    name = "fdg"
    title = "FDG"
    lag_formula = "2(K-1-k)"
    copies = "lag + 1"
    waits_for = "nothing"
    reference = "Zhuang et al. 2019, arXiv 1906.09108"
    in_flight_per_hop = 2

    beta: float = field(default=1.0, metadata={"help": "factor on a gradient per hop."})

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.beta, (int, float)) and not isinstance(self.beta, bool)
        if not number or not 0 < self.beta <= 1:
            raise ConfigurationError(
                f"FDG(beta={self.beta!r}): gradients shrink by beta, so 0 < beta <= 1; 1 is off."
            )

    @property
    def shrink(self) -> float:
        return self.beta
