"""Gradient shrinking: what arrives from the next stage counts less."""

from dataclasses import dataclass

from offbeat.corrections.base import Correction, Hook, Surroundings, require_number


@dataclass(frozen=True)
class Shrink(Correction):
    """Every stage with lag multiplies the gradients that arrive by ``beta``.

    They pass through one stage after the other, so after j hops it is ``beta**j``. The same as
    ``FDG(beta=...)``, for any method.
    """

    name = "shrink"
    title = "Gradient shrinking"
    acts_on = "arriving gradients"
    memory = "0"
    reference = "Zhuang et al. 2019, arXiv 1906.09108"

    beta: float = 0.5

    def __post_init__(self) -> None:
        require_number("Shrink", "beta", self.beta, above=0, most=1)

    @property
    def shrinkage(self) -> float:
        return self.beta

    def hook(self, around: Surroundings) -> Hook:
        return _Shrinking()


class _Shrinking(Hook):
    """Nothing to do: the stage shrinks what arrives."""

    repeats = True
