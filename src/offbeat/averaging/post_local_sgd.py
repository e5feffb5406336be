"""Post-local SGD: synchronous first, local steps once the learning rate has dropped."""

from dataclasses import dataclass

from offbeat.averaging.local_sgd import LocalSGD
from offbeat.errors import ConfigurationError
from offbeat.methods.base import require_count


@dataclass(frozen=True)
class PostLocalSGD(LocalSGD):
    """Gradients are averaged in the first ``switch`` updates; from there on local SGD.

    The paper switches at the first decay of the learning rate. ``offset=1`` averages weights first
    after the first local update, as torch's ``PostLocalSGDOptimizer``. Reference: Lin,
    Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv
    1808.07217).
    """

    name = "post-local-sgd"
    title = "Post-local SGD"
    reference = "Lin et al. 2020, arXiv 1808.07217"

    switch: int

    def __post_init__(self) -> None:
        require_count("switch", self.switch)
        if self.warmup not in (0, self.switch):
            raise ConfigurationError(
                f"PostLocalSGD(switch={self.switch}, warmup={self.warmup}): switch is the warm-up."
                " Leave out warmup."
            )
        object.__setattr__(self, "warmup", self.switch)
        super().__post_init__()
