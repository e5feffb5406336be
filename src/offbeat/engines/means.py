"""What the loss of a part is a mean over, as its graph tells, beside what the part counts."""

import logging
from collections.abc import Iterator
from math import isclose
from typing import Any

import torch
from torch import Tensor

from offbeat import nest
from offbeat.engines.shares import IGNORED, Portion
from offbeat.errors import BatchError
from offbeat.stages.flight import Work

log = logging.getLogger("offbeat")

_NEAR = 1e-5
"""How far sums of weights per class may be apart by rounding."""
_LARGE = 2**22
"""Numbers of an output that is not differentiated twice: logits of a language model."""


class Means:
    """Compares what parts count with what PyTorch's cross entropy has taken its mean over.

    Of the first part it also looks whether the loss compares rows. On a GPU, where to ask is to
    wait, both are done in the first step alone.
    """

    def __init__(self, *, together: bool) -> None:
        """``together``: replicas average gradients."""
        self._together = together
        self._batch = -1
        self._ratios: dict[int, float] = {}
        """Of each cross entropy in the loss: its targets by what the first part counts."""
        self._warned = self._looked = False

    def begin(self) -> None:
        """Starts a fill of the pipe, whose batches are counted anew."""
        self._batch = -1

    def look_at(self, batch: int, work: Work, portion: Portion) -> None:
        """``work``: the next part of a batch, with its loss."""
        if work.loss is None or not portion.amount:
            return
        if not self._looked and (portion.scale != 1.0 or self._together):
            self._looked = True
            if _compares_rows(work):
                log.warning(_PAIRS)
        if self._warned:
            return
        if batch != self._batch:
            self._batch, self._ratios = batch, {}
        for number, mean in enumerate(_means_in(work.loss)):
            weights = mean._saved_total_weight
            total = float(weights)
            expected = []
            if portion.scale != 1.0:  # one of several parts
                ratio = self._ratios.setdefault(number, total / portion.amount)
                expected.append(portion.amount * ratio)
            if portion.kind == "labels":
                expected.append(portion.amount)
            elif portion.kind == "rows" and self._together:
                expected.append(mean._saved_target.numel())
            near = max(_NEAR, torch.finfo(weights.dtype).eps)
            if not all(isclose(total, one, rel_tol=near) for one in expected):
                self._say(total, portion)
                return

    def _say(self, total: float, portion: Portion) -> None:
        words = (
            f"the loss of a part of this batch is a mean over {total:g} targets (some labels are"
            f" ignored, or classes weigh differently), and the part counts {portion.amount:g}"
            f" ({portion.kind}), so that the parts together would not be the loss of the batch."
        )
        if portion.kind == "function":
            self._warned = True
            log.warning("%s Correct weight=. Later parts are not looked at.", words)
            return
        raise BatchError(
            f"{words} Give Trainer(weight=lambda x, y: (y != {IGNORED}).sum()), or what else counts"
            " its targets; weight='rows' goes by rows all the same."
        )


_PASSED = ("Add", "Sub", "Mul", "Div", "ToCopy", "Reshape", "View", "Squeeze", "Clone")


def _means_in(loss: Tensor) -> Iterator[Any]:
    """The cross entropies that a loss is made of, so far as they are means."""
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.name().startswith("NllLoss"):
            if node._saved_reduction == 1:
                yield node
        elif node.name().startswith(_PASSED):
            nodes += [before for before, _ in node.next_functions]


_PAIRS = (
    "the loss compares the rows of a batch with each other (differentiated twice, it has terms of"
    " two rows). In parts, and in replicas, each row meets only those of its part, so this is not"
    " the loss of the whole batch, whatever weight= says. Take a method with one part and one"
    " replica, or say weight='rows' if this is meant."
)


def _compares_rows(work: Work) -> bool:
    """Whether a change in the first half of the rows changes the gradient of the second.

    Nothing is computed anew: the loss, which may count its calls, is differentiated as it is.
    """
    rows = next((t.size(0) for t in nest.tensors(work.target) if t.dim()), 0)
    outputs = [t for t in work.outputs if t.requires_grad and t.dim() and t.size(0) == rows]
    half = rows // 2
    if work.loss is None or not half or sum(t.numel() for t in outputs) > _LARGE:
        return False
    try:
        first = torch.autograd.grad(work.loss, outputs, create_graph=True, allow_unused=True)
        lines = [
            (g[:half] * torch.linspace(1, 2, g[:half].numel()).to(g).view_as(g[:half])).sum()
            for g in first
            if g is not None and g.requires_grad
        ]
        if not lines:
            return False
        second = torch.autograd.grad(lines, outputs, retain_graph=True, allow_unused=True)
    except Exception:  # not everything can be differentiated twice
        return False
    sizes = [(g[:half].abs().max(), g[half:].abs().max()) for g in second if g is not None]
    own, others = (float(torch.stack(part).max()) for part in zip(*sizes, strict=True))
    return others > 1e-4 * own
