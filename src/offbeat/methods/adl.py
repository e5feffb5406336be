"""ADL: accumulation divides the staleness."""

from dataclasses import dataclass, field
from typing import Literal

from offbeat.errors import unknown
from offbeat.methods.base import Asynchronous


@dataclass(frozen=True)
class ADL(Asynchronous):
    """All three locks gone; one update per M backwards, so the lag in updates falls M-fold.

    Update: ``W_k[u+1] = Opt(W_k[u], mean of the M gradients of step u)``; the j-th of them is
    ``ceil((2(K-1-k) - j) / M)`` updates old. ``reduction="sum"`` adds instead (the authors' code).
    Lag: ``ceil(2(K-1-k) / M)``. Memory: lag + 1 weight copies, ``2(K-1-k) + 1`` small graphs.
    Reference: Zhuang, Lin, Toh, "Accumulated Decoupled Learning", 2020 (arXiv 2012.03747).

    >>> ADL(accumulate=2).schedule(3).lags
    (2, 1, 0)
    """

    name = "adl"
    title = "ADL"
    lag_formula = "2(K-1-k) / M"
    copies = "lag + 1"
    waits_for = "nothing"
    reference = "Zhuang et al. 2020, arXiv 2012.03747"
    in_flight_per_hop = 2

    accumulate: int | None = 4
    reduction: Literal["mean", "sum"] = field(
        default="mean", metadata={"help": "what becomes of an update's gradients."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in ("mean", "sum"):
            raise unknown("reduction", self.reduction, ("mean", "sum"))

    @property
    def sums_gradients(self) -> bool:
        return self.reduction == "sum"
