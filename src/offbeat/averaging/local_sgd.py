"""Local SGD: replicas stop and take the average of their weights every few updates."""

from dataclasses import dataclass, field

from offbeat.averaging.base import Periodic, Plan, require_offset


@dataclass(frozen=True)
class LocalSGD(Periodic):
    """``every`` local updates, then ``x_i <- mean of all x``; all wait for it.

    ``offset=1`` averages after updates 1, 1 + ``every``, ..., as torch's ``PeriodicModelAverager``.
    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv
    1805.09767).
    """

    name = "local-sgd"
    title = "Local SGD"
    reference = "Stich 2019, arXiv 1805.09767"

    offset: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_offset(self.offset, self.every)

    def plan(self) -> Plan:
        return Plan(every=self.every, offset=self.offset)
