"""D-PSGD: in a ring every replica averages with its two neighbours while it computes."""

from dataclasses import dataclass

from offbeat.averaging.base import Periodic, Plan


@dataclass(frozen=True)
class DPSGD(Periodic):
    """Decentralized parallel SGD: ``x_i <- sum_j W_ij x_j - lr g_i(x_i)`` over a ring.

    W is 1/3 for a replica and each of its neighbours (1/2 where there are two replicas). The
    gradient is that at x_i itself, so the average is on its way while it is computed. With
    ``every`` above 1 replicas exchange every so many updates: ``x_i <- sum_j W_ij x_j,sent + (x_i -
    x_i,sent)``. The mean over all replicas keeps every step. Reference: Lian et al., "Can
    Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017 (arXiv 1705.09056).
    """

    name = "d-psgd"
    title = "D-PSGD"
    reference = "Lian et al. 2017, arXiv 1705.09056"

    every: int = 1

    def plan(self) -> Plan:
        return Plan(every=self.every, delay=self.every, keep=0.0, progress=1.0, partners=neighbours)


def neighbours(_round: int, replica: int, replicas: int) -> set[int]:
    return {(replica + step) % replicas for step in (-1, 0, 1)}
