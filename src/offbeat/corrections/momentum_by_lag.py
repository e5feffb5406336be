"""Another momentum where gradients are older."""

from dataclasses import dataclass

from offbeat.corrections.base import Correction, Hook, Moment, Surroundings, require_number
from offbeat.errors import ConfigurationError


@dataclass(frozen=True)
class MomentumByLag(Correction):
    """``b <- b + D (towards - b) / K``: the momentum goes ``towards`` another value with the lag.

    D is the stage's lag once the pipe is full, and b the same from the first update on: Adam's bias
    correction holds for one that does not change.

    Up, as by default, where another correction keeps high momentum stable; down where there is
    none. SGD's and Muon's momentum, Adam's beta1. Where D is more than the number of stages K it is
    ``towards`` itself. Costs nothing.
    """

    name = "momentum-by-lag"
    title = "Momentum by lag"
    acts_on = "momentum"
    memory = "0"
    reference = "Ajanthan et al. 2025, arXiv 2505.01099"

    towards: float = 0.99

    def __post_init__(self) -> None:
        require_number("MomentumByLag", "towards", self.towards, above=-1, most=1)
        if not 0 <= self.towards < 1:
            raise ConfigurationError(
                f"MomentumByLag(towards={self.towards!r}): a momentum is at least 0 and below 1."
            )

    def hook(self, around: Surroundings) -> "_Momentum":
        for group in around.groups:
            if not group.momentum:
                raise ConfigurationError(
                    f"momentum-by-lag: {group.optimizer_name} of stage {around.stage} has no"
                    " momentum to change. Give it one, as in SGD(params, lr=0.1, momentum=0.9)."
                )
        return _Momentum(self, around)


class _Momentum(Hook):
    repeats = True

    def __init__(self, settings: MomentumByLag, around: Surroundings) -> None:
        self._towards = settings.towards
        self._share = min(1.0, around.lag / around.stages)

    def momentum(self, moment: Moment, momentum: float) -> float:
        return momentum + self._share * (self._towards - momentum)
