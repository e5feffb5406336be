"""AllReduce: gradients are averaged before every update, as in DistributedDataParallel."""

from dataclasses import dataclass

from offbeat.averaging.base import Averaging, Plan
from offbeat.errors import ConfigurationError


@dataclass(frozen=True)
class AllReduce(Averaging):
    """Synchronous data parallelism: every replica applies the mean of all gradients.

    Update: ``x <- Opt(x, (1/R) sum_i g_i(x))``. Replicas stay equal. Each update waits for the
    slowest replica and for the network.
    """

    name = "all-reduce"
    title = "AllReduce"
    reference = "synchronous SGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, plain in (("warmup", (0,)), ("optimizer_state", (None, "keep"))):
            if getattr(self, setting) not in plain:
                raise ConfigurationError(
                    f"AllReduce({setting}={getattr(self, setting)!r}): gradients are averaged in"
                    " every update, so there is no merge to prepare or to reset at. Leave it out."
                )

    def plan(self) -> Plan | None:
        return None
