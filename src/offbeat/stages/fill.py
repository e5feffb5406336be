"""A fill: what a method decides about one stage until the pipe is drained again."""

from dataclasses import dataclass

from offbeat.methods.base import Method, Rule
from offbeat.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Fill:
    """All that a stage, its corrections and its guard have to know before the first forward.

    The defaults are plain training.
    """

    rule: Rule = "stash"
    in_flight: int = 0
    """Micro-batches that the stage holds between two steps once the pipe is full."""
    kept_versions: int = 0
    """How many versions before the newest a forward may ask for."""
    shrink: float = 1.0
    """Factor on every gradient that arrives from the next stage."""
    local_loss: bool = False
    synchronous: bool = True
    """Whether no stage lags and one loss is for all: then all stages clip and drop together."""
    lag: int = 0
    """The largest of the stage, in updates."""
    micro_batches: int = 1
    first_batch: int = 0
    """The number of the fill's first micro-batch."""
    first_update: int = 0
    """The version of the stage's weights when it starts."""

    @classmethod
    def of(
        cls, method: Method, schedule: Schedule, stage: int, first_batch: int, first_update: int
    ) -> "Fill":
        """What a method and its schedule say about the stage of this number."""
        return cls(
            rule=method.rule,
            in_flight=schedule.in_flight(stage),
            kept_versions=schedule.kept_versions(stage),
            shrink=method.shrink,
            local_loss=schedule.local_losses,
            synchronous=schedule.synchronous,
            lag=schedule.lags[stage],
            micro_batches=schedule.micro_batches,
            first_batch=first_batch,
            first_update=first_update,
        )

    @property
    def plain(self) -> bool:
        """Whether nothing is in flight across an update: then all rules are plain autograd."""
        return self.in_flight == 0 and self.kept_versions == 0
