"""PipeDream-2BW: two buffered weights, a constant lag of one."""

from dataclasses import dataclass, replace

from offbeat.errors import ConfigurationError
from offbeat.methods.base import Asynchronous
from offbeat.schedules.schedule import Schedule


@dataclass(frozen=True)
class PipeDream2BW(Asynchronous):
    """1F1B in micro-batches; step u reads the weights before the newest at every stage.

    Update: ``W[u+1] = Opt(W[u], mean gradient of step u at W[max(0, u-1)])``.
    Lag: 1 at every stage. Memory: 2 weight copies. ``accumulate`` must be at least the number of
    stages (the default), so that ``W[u-1]`` exists when step u begins.
    Reference: Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training".

    >>> PipeDream2BW().schedule(4).lags
    (1, 1, 1, 1)
    """

    name = "pipedream-2bw"
    title = "PipeDream-2BW"
    lag_formula = "1"
    copies = "2"
    waits_for = "nothing, but no slack per hop"
    reference = "Narayanan et al. 2021, arXiv 2006.09503"
    in_flight_per_hop = 1

    accumulate: int | None = None

    def schedule(self, stages: int) -> Schedule:
        micro_batches = self.micro_batches(stages)
        if micro_batches < stages:
            raise ConfigurationError(
                f"PipeDream2BW(accumulate={micro_batches}) over {stages} stages: the version it"
                f" reads would not exist yet. Give accumulate >= {stages}, or leave it out."
            )
        schedule = super().schedule(stages)
        cycles = tuple(
            tuple(slot._replace(version=-1) if slot.kind == "F" else slot for slot in cycle)
            for cycle in schedule.cycles
        )
        return replace(schedule, cycles=cycles)

    def lags(self, stages: int) -> tuple[int, ...]:
        return (1,) * stages
