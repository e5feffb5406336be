"""How much each part of a batch counts: as much as what the mean in its loss is taken over.

A loss is a mean, and a mean of means is that of the whole only if each counts what it is over: rows
where rows are equal, otherwise labels, tokens, or what ``Trainer(weight=)`` says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import BatchError
from offbeat.nest import Nest
from offbeat.transport.base import Key

if TYPE_CHECKING:
    from offbeat.engines.pipeline import Pipeline

Count = Callable[[Nest, Nest], Any]
"""``count(x, y)`` of a batch, or of a part of one, is a number."""
IGNORED = -100
"""The label that counts nothing, as in PyTorch's cross entropy and Hugging Face's models."""
_SHIFTED = (None, "ForCausalLM", "ForConditionalGeneration")
"""Hugging Face's kinds of loss (``loss_type``) that compare a place with the next one's label."""


class Portion(NamedTuple):
    """What a part of a batch is of it; travels from stage to stage with the part."""

    scale: float
    """Factor on the loss's gradient; 0 where nothing in the part counts."""
    share: float
    """Its weight in the reported loss."""
    amount: float
    """What it counts."""
    kind: str
    """What was counted: rows, labels, or by a function."""

    def of(self, loss: Tensor) -> Tensor:
        """What it adds to the reported loss. A mean over nothing, which is no number, adds none."""
        if self.share == 0.0:
            return torch.zeros_like(loss)
        return loss * self.share


WHOLE = Portion(1.0, 1.0, 1.0, "rows")
"""A batch in one part."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What is counted."""

    function: Count | None = None
    """The user's own."""
    asked_for_rows: bool = False
    """Whether rows count whatever the loss does."""
    is_sum: bool = False
    """Whether losses are sums: those of parts are added as they are."""
    shifted: bool = False
    """Whether the model's own loss has no use for the first label of a row."""

    @property
    def words(self) -> str:
        """The same in every process."""
        if self.is_sum:
            return "sum"
        return "a function" if self.function else "rows" if self.asked_for_rows else "None"

    def kind(self, x: Nest) -> str:
        if self.is_sum:
            return "sum"
        if self.function is not None:
            return "function"
        return "rows" if self.asked_for_rows or _labels_in(x) is None else "labels"

    def of(self, x: Nest, y: Nest) -> Any:
        """What a batch or a part of one counts, as it comes."""
        if self.is_sum:
            return 1
        if self.function is not None:
            return self.function(x, y)
        labels = None if self.asked_for_rows else _labels_in(x)
        if labels is None:
            return rows_of(x)
        return ((labels[..., 1:] if self.shifted and labels.dim() > 1 else labels) != IGNORED).sum()


def _labels_in(x: Nest) -> Tensor | None:
    """The labels of a model that is given them, to compute its loss by itself."""
    labels = x.get("labels") if isinstance(x, Mapping) else None
    whole = isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point()
    return labels if whole else None


def shifts_labels(model: nn.Module) -> bool:
    """Whether its own loss is that of Hugging Face's causal language models."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_type", "none") in _SHIFTED


def rows_of(batch: Nest) -> int:
    tensors = nest.tensors(batch)
    return tensors[0].size(0) if tensors[0].dim() else 1


# ------------------------------------------------------------------------- counting


def counts_of(weight: Weight, parts: Sequence[tuple[Nest, Nest]], what: str) -> list[float]:
    """``what``: the parts are of this, in words."""
    found = [weight.of(x, y) for x, y in parts]
    if all(isinstance(count, Tensor) and count.dim() == 0 for count in found):
        found = torch.stack(found).tolist()  # a device is waited for once
    counts = [count.item() if _is_single(count) else count for count in found]
    for number, count in enumerate(counts):
        real = isinstance(count, (int, float)) and not isinstance(count, bool)
        if not real or not 0 <= count < inf:
            raise BatchError(
                f"weight(x, y) gave {_shown(count)} for part {number} of {len(counts)} of {what}:"
                " return one finite number, 0 or more, such as (y != -100).sum()."
            )
    return counts


def _is_single(count: object) -> bool:
    return isinstance(count, np.generic) or (isinstance(count, Tensor) and count.numel() == 1)


def _shown(count: object) -> str:
    return f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else repr(count)


def portions(
    pipeline: "Pipeline", kind: str, counts: Sequence[Sequence[float]]
) -> list[list[Portion]]:
    """Of every part of each replica of this process.

    Where replicas average gradients, a part's factor goes by the total over all of them.
    """
    if kind == "sum":
        return [[Portion(1.0, 1.0, count, kind) for count in own] for own in counts]
    totals = [sum(of_replica) for of_replica in counts]
    here, everywhere = sum(totals), totals
    together = _are_averaged(pipeline)
    if together and kind != "rows" and len(counts) < pipeline.engine.placement.replicas:
        everywhere = _totals_of_all(pipeline, totals)
        refuse_nothing(sum(everywhere))
    found = []
    for own, total in zip(counts, totals, strict=True):
        over, among = (sum(everywhere), len(everywhere)) if together else (total, 1)
        scales = [count * among / over for count in own]
        if pipeline.method.sums_gradients:
            scales = [float(count > 0) for count in own]
        shares = [count * len(counts) / here if here else nan for count in own]
        rows = zip(scales, shares, own, strict=True)
        found.append([Portion(*row, kind) for row in rows])
    return found


def _are_averaged(pipeline: "Pipeline") -> bool:
    """Whether the gradients of this batch are averaged over all replicas."""
    averaging = pipeline.setup.averaging
    return averaging is not None and averaging.averages_gradients(pipeline.position.step)


def refuse_empty(pipeline: "Pipeline", counts: Sequence[Sequence[float]]) -> None:
    """Refuses a batch, or a replica's part of it, in which nothing counts, if that can be known."""
    totals = [sum(of_replica) for of_replica in counts]
    if not _are_averaged(pipeline):
        for total in totals:
            refuse_nothing(total)
    elif len(counts) == pipeline.engine.placement.replicas:
        refuse_nothing(sum(totals))


def refuse_nothing(total: float) -> None:
    if not total:
        raise BatchError(
            "nothing in this batch counts: its weight is 0 in all parts (of a model's own labels,"
            f" all are {IGNORED}), and a mean over nothing is no number. Leave such batches out."
        )


def _totals_of_all(pipeline: "Pipeline", totals: Sequence[float]) -> list[float]:
    """What the batch counts in each replica: the one number that they tell each other."""
    engine, key = pipeline.engine, Key("count", 0, pipeline.position.step)
    transports = [engine.transports[replica] for replica in engine.placement.replicas_here]
    for transport, total in zip(transports, totals, strict=True):
        transport.gather(key, [torch.tensor([total], dtype=torch.float64)])
    *_, gathered = [transport.receive(key) for transport in transports]
    return [float(part) for (part,) in gathered.parts]
