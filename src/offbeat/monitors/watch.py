"""What a monitor does in one stage."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from offbeat.corrections.base import Hook, Surroundings
from offbeat.corrections.sample import Sample
from offbeat.records.readings import What


class Watch(Hook, ABC):
    """A monitor at work in one stage with lag: a hook that looks and changes nothing.

    It is called before the corrections are, so it sees gradients as they arrive. A checkpoint holds
    what :meth:`memory` names.
    """

    def __init__(self, around: Surroundings, sample: Sample) -> None:
        self.around = around
        self.sample = sample
        """The coordinates of the stage that all monitors go by."""
        self.late = float(around.lag)
        """Updates by which the parts of the last update were late, on average."""

    def judge(self, predicted: Tensor, read: Tensor) -> None:
        """Compares samples of what a forward predicted, and of what it read, with now."""

    @abstractmethod
    def readings(self) -> Iterator[tuple[What, float]]:
        """The values of now, read back from the device."""
