"""Gap-aware gradients: divided by how far the weights have gone since."""

from dataclasses import dataclass

import torch

from offbeat.corrections.base import Correction, Hook, Moment, Numbers, Surroundings, require_number
from offbeat.corrections.groups import Group, Tensors, with_gradients
from offbeat.corrections.read_weights import refuse_maximizing, refuse_recompute
from offbeat.errors import ConfigurationError
from offbeat.methods.base import Rule

_EPS = 1e-12


@dataclass(frozen=True)
class GapAware(Correction):
    """``g <- g / (1 + |w_now - w_read| / C)``, elementwise: gradients of far-away weights shrink.

    C is the size of a usual step, ``largest lr so far x sqrt(mean of g^2)``, with a running mean
    that forgets by ``decay``. Weight decay that the optimizer adds to g is divided with it.
    w_read is what the forward read; of several micro-batches in an update, its mean over them.
    """

    name = "gap-aware"
    title = "Gap-aware gradients"
    acts_on = "gradients"
    memory = "D + 2; micro-batches: 1 more"
    reference = "Barkai et al. 2020, arXiv 1909.10802"

    decay: float = 0.99

    def __post_init__(self) -> None:
        require_number("GapAware", "decay", self.decay, above=0, most=1)
        if self.decay == 1:
            raise ConfigurationError("GapAware(decay=1): a mean that forgets nothing never begins.")

    def check_rule(self, rule: Rule, *, reads_old_versions: bool) -> None:
        refuse_recompute(self.name, rule)

    def hook(self, around: Surroundings) -> "Gap":
        refuse_maximizing(self.name, around)
        return Gap(self, around)


class Gap(Hook):
    needs_read = True

    def __init__(self, settings: GapAware, around: Surroundings) -> None:
        self._decay = settings.decay
        self._groups = around.groups
        self._parameters = around.parameters
        self._places = {p: place for place, p in enumerate(around.parameters)}
        self._squares = tuple(torch.zeros_like(p) for p in around.parameters)
        # Both on the host. A weight counts its own gradients: it may get its first one late.
        self._seen = torch.zeros(len(self._squares), dtype=torch.float64)
        """The weight of all gradients in each running mean: its bias correction."""
        self._largest = torch.zeros(len(self._groups), dtype=torch.float64)

    def numbers(self, moment: Moment) -> Numbers:
        """Per group the largest learning rate so far, 0 where nothing is to be done; then what
        each parameter has seen."""
        counts = torch.tensor([p.grad is not None for p in self._parameters])
        self._seen.copy_(self._seen.lerp(torch.where(counts, 1.0, self._seen), 1 - self._decay))
        rates = [float(group.lr) for group in self._groups]
        self._largest.copy_(self._largest.maximum(self._largest.new_tensor(rates)))
        largest: list[float] = self._largest.tolist()
        return [*(largest if moment.lag else [0.0] * len(rates)), *self._seen.tolist()]

    def gradients(self, numbers: Numbers, read: Tensors | None) -> None:
        assert read is not None
        rates, seen = numbers[: len(self._groups)], numbers[len(self._groups) :]
        for group, rate in zip(self._groups, rates, strict=True):
            self._shrink(group, float(rate), seen, read)

    def _shrink(self, group: Group, rate: float, seen: Numbers, read: Tensors) -> None:
        found, weights, gradients = with_gradients(group.parameters)
        if not found:
            return
        places = [self._places[group.parameters[place]] for place in found]
        squares = [self._squares[place] for place in places]
        torch._foreach_mul_(squares, self._decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self._decay)
        if not rate:
            return
        usual = torch._foreach_sqrt(torch._foreach_div(squares, [float(seen[n]) for n in places]))
        usual = torch._foreach_add(torch._foreach_mul(usual, rate), _EPS)
        gap = torch._foreach_abs(torch._foreach_sub(weights, [read[place] for place in places]))
        penalty = torch._foreach_add(torch._foreach_div(gap, usual), 1.0)
        decay = torch._foreach_mul(weights, group.coupled_decay)
        torch._foreach_add_(gradients, decay)
        torch._foreach_div_(gradients, penalty)
        torch._foreach_sub_(gradients, decay)

    def memory(self) -> dict[str, Tensors]:
        return {"squares": self._squares, "seen": (self._seen,), "largest": (self._largest,)}
