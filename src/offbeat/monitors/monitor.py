"""What a monitor is asked to watch."""

from dataclasses import dataclass

from offbeat.methods.base import require_count


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What to watch: ``Trainer(monitor=Monitor())``; the values are in ``trainer.readings``.

    ``every``  updates between two readings of a stage.
    ``probe``  keep the weights that forwards have read (lag + 1 copies), so that ``trainer.probe``
               can compare stale with fresh gradients.

    Watching changes no bit of the training.
    """

    every: int = 10
    probe: bool = False

    def __post_init__(self) -> None:
        require_count("every", self.every)
