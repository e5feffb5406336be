"""Look-ahead: Nesterov's momentum where there is lag."""

from dataclasses import dataclass

from offbeat.corrections.base import Correction, Surroundings
from offbeat.corrections.spike_compensation import Spike


@dataclass(frozen=True)
class LookAhead(Correction):
    """Nesterov's step for SGD and its like for Adam (NAdam), at stages with lag.

    SGD: ``w <- w - lr (g + m v)``. Adam, AdamW: ``b1 m + (1 - b1) g`` in place of the first moment
    m, with Adam's own bias correction and a constant momentum. This is spike compensation for a lag
    of one, whatever the lag. Ajanthan et al. 2025 use it with a momentum near 1.
    """

    name = "look-ahead"
    title = "Look-ahead"
    acts_on = "step"
    memory = "0"
    reference = "Ajanthan et al. 2025, arXiv 2505.01099"

    def hook(self, around: Surroundings) -> Spike:
        return Spike(self.name, around, most=1)
