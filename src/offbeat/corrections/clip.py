"""Clipping per stage: there is no global norm without a barrier."""

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.corrections.base import Correction, Hook, Numbers, Surroundings, require_number
from offbeat.corrections.groups import Tensors, with_gradients
from offbeat.errors import ConfigurationError

_DECAY = 0.99


@dataclass(frozen=True)
class ClipPerStage(Correction):
    """Stages with lag bound the norm of their own gradients.

    ``norm`` is the bound itself; ``times``, above 1, is a multiple of the stage's usual norm, a
    running mean over about a hundred updates. Give one of them. Beside the trainer's ``clip``,
    which is global where no stage lags. Costs nothing.
    """

    name = "clip-per-stage"
    title = "Clipping per stage"
    acts_on = "gradients"
    memory = "0"
    reference = "Ajanthan et al. 2025, arXiv 2505.01099"

    norm: float | None = None
    times: float | None = None

    def __post_init__(self) -> None:
        if (self.norm is None) == (self.times is None):
            raise ConfigurationError(
                f"ClipPerStage(norm={self.norm!r}, times={self.times!r}): give one of the two, a"
                " norm or a multiple of the stage's usual norm, as in times=3."
            )
        if self.times is None:
            require_number("ClipPerStage", "norm", self.norm, above=0)
        else:  # up to 1 the bound, made of clipped norms, would fall for ever
            require_number("ClipPerStage", "times", self.times, above=1)

    def hook(self, around: Surroundings) -> "Clipping":
        return Clipping(self, around)


class Clipping(Hook):
    repeats = True

    def __init__(self, settings: ClipPerStage, around: Surroundings) -> None:
        self._settings = settings
        self._parameters = around.parameters
        # The running mean of the norms, and the weight of all of them in it.
        self._usual = torch.zeros(2, dtype=torch.float64, device=around.parameters[0].device)

    def gradients(self, numbers: Numbers, read: Tensors | None) -> None:
        _, _, gradients = with_gradients(self._parameters)
        if not gradients:
            return
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self._settings.norm is not None:
            bound = torch.full_like(norm, self._settings.norm)
        else:
            bound = self._bound_by_history(norm)
        torch._foreach_mul_(gradients, (bound / (norm + 1e-6)).clamp(max=1.0))

    def _bound_by_history(self, norm: Tensor) -> Tensor:
        """So many times the mean of the norms before this one; the first is left as it is.

        Gradients of zeros, as below a head that begins with zeros, say nothing of the usual norm.
        """
        assert self._settings.times is not None
        usual, weight = self._usual
        bound = torch.where(weight > 0, self._settings.times * usual / weight, torch.inf)
        bound = bound.to(norm.dtype)
        # What counts is the clipped norm: one spike must not raise the bound for the next.
        counted = torch.stack([torch.minimum(norm, bound), torch.ones_like(norm)])
        counted = counted.to(self._usual.dtype)
        self._usual.copy_(torch.where(norm > 0, self._usual.lerp(counted, 1 - _DECAY), self._usual))
        return bound

    def memory(self) -> dict[str, Tensors]:
        return {"usual": (self._usual,)}
