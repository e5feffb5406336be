"""Evaluation: loss and accuracy of the newest weights over a loader, added up batch by batch."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offbeat import nest
from offbeat.engines.feed import check_devices, pairs_of
from offbeat.engines.shares import counts_of, refuse_nothing, rows_of
from offbeat.errors import BatchError
from offbeat.nest import Nest
from offbeat.stages.network import Loss, precision
from offbeat.stages.trial import call, keep_modes

if TYPE_CHECKING:
    from offbeat.averaging.replicas import Whose
    from offbeat.engines.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means: ``loss`` over what counts (``weight=``), ``accuracy`` over rows of class numbers."""

    loss: float
    accuracy: float | None
    rows: int


class Score:
    """Adds up batches; losses are computed in ``context``, as those of training are."""

    def __init__(self, loss: Loss, context: Callable[[], AbstractContextManager[object]]) -> None:
        self._loss = loss
        self._context = context
        self._total = 0.0
        self._counted = 0.0
        self._rows = 0
        self._hits: int | None = 0

    def add(self, output: Nest, target: Nest, count: float | None) -> None:
        """``count``: what the batch counts, None for its rows."""
        # An output may begin with a tensor that has no rows, such as a loss of its own.
        rows = rows_of([tensor for tensor in nest.tensors([output, target]) if tensor.dim()])
        hits = _hits(output, target)
        count = rows if count is None else count
        if count:
            with self._context():
                self._total += float(self._loss(output, target)) * count
        self._counted += count
        self._rows += rows
        self._hits = None if hits is None or self._hits is None else self._hits + hits

    def result(self) -> Evaluation:
        if not self._rows:
            raise BatchError("evaluate() got an empty loader: give at least one (x, y).")
        refuse_nothing(self._counted)
        return Evaluation(
            loss=self._total / self._counted,
            accuracy=None if self._hits is None else self._hits / self._rows,
            rows=self._rows,
        )


def _hits(output: Nest, target: Nest) -> int | None:
    """Rows whose largest output is at the target, if the target is a class number per row."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    whole = not target.is_floating_point() and not target.is_complex()
    if not whole or output.dim() != 2 or target.dim() != 1 or len(output) != len(target):
        return None
    if output.size(1) == 1:  # one number for two classes, of which only the loss knows the border
        return None
    return int((output.argmax(1) == target).sum())


def evaluate(
    pipeline: "Pipeline", loader: Iterable[tuple[Nest, Nest]], *, of: "Whose"
) -> Evaluation:
    """``of``: which replicas' weights."""
    pipeline.replicas.check(of)
    setup, engine, model = pipeline.setup, pipeline.engine, pipeline.cut.model
    context = partial(precision, setup.device, setup.autocast)
    score = Score(setup.loss, context)
    with (
        pipeline.following(),
        # Nobody else waits for what an error in one process leaves undone.
        pipeline.stopping_on_error(alone=False),
        engine.between_steps(),
        keep_modes(model),
        torch.no_grad(),
    ):
        model.eval()
        states = pipeline.replicas.states(of)
        shown = engine.shown_workers()
        for number, (x, y) in enumerate(pairs_of(loader, "evaluate")):
            check_devices(nest.tensors([x, y]), setup.device)
            if engine.placement.holds_first:
                pipeline.cut.check_batch([x], 1)
            count = _count_of(pipeline, number, x, y)
            end = None
            for worker in shown:
                end = worker.predict(number, (x, count), states[worker.stage.index])
            if not shown:  # nothing is cut before the first batch has been weighed
                with context():
                    end = call(model, x), count
            if end is not None:
                score.add(end[0], y, end[1])
        return engine.share_result(score) if shown else score.result()


def _count_of(pipeline: "Pipeline", number: int, x: Nest, y: Nest) -> float | None:
    """What a batch counts, where the first stage is; None for its rows."""
    weight = pipeline.setup.weight
    if not pipeline.engine.placement.holds_first or weight.kind(x) == "rows":
        return None
    (count,) = counts_of(weight, [(x, y)], f"batch {number} of evaluate()")
    return count
