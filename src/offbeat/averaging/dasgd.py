"""DaSGD: averages arrive while training goes on."""

from dataclasses import dataclass

from offbeat.averaging.base import Periodic, Plan, require_delay, require_share


@dataclass(frozen=True)
class DaSGD(Periodic):
    """Local SGD with delayed averaging: nobody waits for an average that takes ``delay`` steps.

    Every ``every`` updates the average z of the weights is started; ``delay`` updates later
    ``x <- keep x + (1 - keep) z``. Of the steps taken in between the share ``keep`` survives, so a
    round of ``every`` updates makes the progress of ``every - delay + keep delay``.
    ``progress=1`` is the mean-preserving merge ``x <- x + (1 - keep)(z - x_sent)``, which loses
    nothing and holds one more copy of the weights. Hidden completely while an average takes at most
    ``delay`` updates. Reference: Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in
    Distributed Training Using Delayed Averaging" (arXiv 2006.00441).

    >>> DaSGD(every=4, delay=1).updates_kept
    3.25
    >>> DaSGD(every=4, delay=1, progress=1.0).updates_kept
    4.0
    """

    name = "dasgd"
    title = "DaSGD"
    reference = "Zhou et al. 2020, arXiv 2006.00441"

    delay: int
    keep: float = 0.25
    progress: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_delay(self.delay, self.every)
        require_share("keep", self.keep, "the share of its own weights a replica keeps at a merge")
        if self.progress is not None:
            meaning = "the share of the steps since the start that survives a merge"
            require_share("progress", self.progress, meaning)

    @property
    def updates_kept(self) -> float:
        """How many of a round's updates the mean over replicas keeps."""
        return self.every - self.delay + self.plan().kept_progress * self.delay

    def plan(self) -> Plan:
        return Plan(every=self.every, delay=self.delay, keep=self.keep, progress=self.progress)
