"""Local SGD: replicas stop and take the average of their weights every few updates."""

from dataclasses import dataclass

from offbeat.averaging.base import Averaging, Plan, require_every


@dataclass(frozen=True)
class LocalSGD(Averaging):
    """``every`` local updates, then ``x_i <- mean of all x``; all wait for it.

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv
    1805.09767).
    """

    name = "local-sgd"
    title = "Local SGD"
    reference = "Stich 2019, arXiv 1805.09767"

    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_every(self.every)

    def plan(self) -> Plan:
        return Plan(every=self.every)
