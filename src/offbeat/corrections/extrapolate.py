"""Update extrapolation: steps are continued along their own change."""

from dataclasses import dataclass

import torch

from offbeat.corrections.base import Correction, Hook, Moment, Numbers, Surroundings, require_number
from offbeat.corrections.groups import Tensors, with_gradients


@dataclass(frozen=True)
class Extrapolate(Correction):
    """``w[t+1] = w[t] + u[t] + gain D (u[t] - u[t-1])``, u being the optimizer's own steps.

    On a quadratic it is the same filter as predicting the weights with ``horizon="lag"``, but the
    forward is left alone, and it takes any optimizer. With D = 1 it is one-step error feedback as
    far as its formula can be told from outside: the paper's own (arXiv 2606.30634) was not seen.
    """

    name = "extrapolate"
    title = "Update extrapolation"
    acts_on = "step"
    memory = "2"
    reference = "derived; compare arXiv 2606.30634"

    gain: float = 1.0

    def __post_init__(self) -> None:
        require_number("Extrapolate", "gain", self.gain, above=0)

    def hook(self, around: Surroundings) -> "Extrapolation":
        return Extrapolation(self, around)


class Extrapolation(Hook):
    needs_before = True
    repeats = True

    def __init__(self, settings: Extrapolate, around: Surroundings) -> None:
        self._gain = settings.gain
        self._parameters = around.parameters
        self._previous = tuple(torch.zeros_like(p) for p in around.parameters)

    def numbers(self, moment: Moment) -> Numbers:
        # The very first update has nothing before it; its lag is 0 unless a checkpoint was lost.
        return [self._gain * moment.lag if moment.update else 0.0]

    def after_step(self, numbers: Numbers, before: Tensors | None) -> None:
        assert before is not None
        # What got no gradient, as in an update that was skipped, has made no step to go on with.
        places, weights, _ = with_gradients(self._parameters)
        if not places:
            return
        previous = [self._previous[place] for place in places]
        step = torch._foreach_sub(weights, [before[place] for place in places])
        change = torch._foreach_sub(step, previous)
        torch._foreach_add_(weights, torch._foreach_mul(change, numbers[0]))
        torch._foreach_copy_(previous, step)

    def memory(self) -> dict[str, Tensors]:
        return {"previous": self._previous}
