"""Local SGD: replicas stop and take the average of their weights every few updates."""

from dataclasses import dataclass

from offbeat.averaging.base import Periodic


@dataclass(frozen=True)
class LocalSGD(Periodic):
    """``every`` local updates, then ``x_i <- mean of all x``; all wait for it.

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv
    1805.09767).
    """

    name = "local-sgd"
    title = "Local SGD"
    reference = "Stich 2019, arXiv 1805.09767"
