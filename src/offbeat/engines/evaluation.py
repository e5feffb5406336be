"""Evaluation: what the newest weights make of a loader: loss and metrics, or the outputs alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.engines.feed import check_devices, pairs_of
from offbeat.engines.guests import check_keys
from offbeat.engines.shares import counts_of, refuse_nothing, rows_of
from offbeat.errors import BatchError, ConfigurationError
from offbeat.nest import Nest, rid_of_kinds
from offbeat.stages.buffers import WrittenBuffers
from offbeat.stages.network import Loss, precision
from offbeat.stages.trial import call, keep_modes

if TYPE_CHECKING:
    from offbeat.averaging.replicas import Whose
    from offbeat.engines.pipeline import Pipeline


Metric = Callable[[Nest, Nest], Any]
"""``metric(output, target)`` of all batches of a loader together is a number."""
End = tuple[Nest, float | None]
"""The model's output for a batch, and what the batch counts."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means: ``loss`` over what counts (``weight=``), ``accuracy`` over rows of class numbers."""

    loss: float
    accuracy: float | None
    rows: int
    metrics: dict[str, float] = field(default_factory=dict)
    """What the functions of ``evaluate(metrics=)`` returned."""


class Score:
    """Adds up batches; losses are computed in ``context``, as those of training are."""

    def __init__(
        self,
        loss: Loss,
        context: Callable[[], AbstractContextManager[object]],
        metrics: Mapping[str, Metric],
        *,
        is_sum: bool,
    ) -> None:
        """``is_sum``: losses are sums over rows, not means."""
        self._loss, self._context = loss, context
        self._metrics, self._is_sum = metrics, is_sum
        self._kept: list[tuple[Nest, Nest]] = []
        """Outputs and targets, where somebody wants to see all of them."""
        self._total = 0.0
        self._counted = 0.0
        self._rows = 0
        self._hits: int | None = 0

    def add(self, output: Nest, x: Nest, target: Nest, count: float | None) -> None:
        """``count``: what the batch counts, None for its rows."""
        if self._metrics:
            own = x.get("labels") if target is None and isinstance(x, Mapping) else target
            self._kept.append((nest.replace(output, Tensor.detach), own))
        # An output may begin with a tensor that has no rows, such as a loss of its own.
        rows = rows_of([tensor for tensor in nest.tensors([output, target]) if tensor.dim()])
        hits = _hits(output, target)
        count = rows if count is None else count
        if count:
            with self._context():
                loss = float(self._loss(output, target))
                self._total += loss if self._is_sum else loss * count
        self._counted += count
        self._rows += rows
        self._hits = None if hits is None or self._hits is None else self._hits + hits

    def result(self) -> Evaluation:
        if not self._rows:
            raise BatchError("evaluate() got an empty loader: give at least one (x, y).")
        refuse_nothing(self._counted)
        metrics = {}
        if self._metrics:
            outputs, targets = (_joined(own) for own in zip(*self._kept, strict=True))
            metrics = {
                name: _number(name, f(outputs, targets)) for name, f in self._metrics.items()
            }
        return Evaluation(
            loss=self._total / self._counted,
            accuracy=None if self._hits is None else self._hits / self._rows,
            rows=self._rows,
            metrics=metrics,
        )


def _joined(batches: Sequence[Nest]) -> Nest:
    """The batches as one: rows behind each other, single numbers in a row of their own."""
    columns = list(zip(*map(nest.tensors, batches), strict=False))
    same = len({len(nest.tensors(batch)) for batch in batches}) == 1
    whole = []
    for tensors in columns:
        rows = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
        if not same or len({tensor.shape[1:] for tensor in rows}) > 1:
            shapes = ", ".join(map(str, dict.fromkeys(tuple(t.shape) for t in tensors)))
            raise BatchError(
                f"metrics see all batches as one, and these differ beyond their rows: {shapes}."
                " Pad them to one length, or take predict(loader), which gives them one by one."
            )
        whole.append(torch.cat(rows))
    found = iter(whole)
    return nest.replace(batches[0], lambda _: next(found))


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"metrics={{{name!r}: ...}} returned a {type(value).__name__}: return one number."
        ) from None


def checked_metrics(metrics: Mapping[str, Metric] | None) -> Mapping[str, Metric]:
    found = {} if metrics is None else metrics
    if not isinstance(found, Mapping) or not all(map(callable, found.values())):
        raise ConfigurationError(
            f"metrics={metrics!r}: give functions by name, as in metrics={{'accuracy': lambda"
            " output, y: (output.argmax(1) == y).float().mean()}."
        )
    return found


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


class Passes:
    """Runs batches through the newest weights, one after the other, in evaluation."""

    def __init__(self, pipeline: "Pipeline", of: "Whose") -> None:
        """``of``: which replicas' weights."""
        pipeline.replicas.check(of)
        self._pipeline, self._number = pipeline, -1
        # A forward may write into buffers, in evaluation too: into these, not into the model's.
        self._states = {
            stage: {n: v if isinstance(v, nn.Parameter) else v.clone() for n, v in state.items()}
            for stage, state in pipeline.replicas.states(of).items()
        }
        self._shown = pipeline.engine.shown_workers()
        setup = pipeline.setup
        self.context = partial(precision, setup.device, setup.autocast)

    def run(self, x: Nest, y: Nest, *, verb: str) -> End | None:
        """The output, where the last stage is; before the first step that is everywhere."""
        pipeline, number = self._pipeline, self._number + 1
        self._number = number
        check_devices(nest.tensors([x, y]), pipeline.setup.device)
        if pipeline.engine.placement.holds_first:
            if isinstance(x, Mapping):
                check_keys(pipeline.cut.model, x)
            pipeline.cut.check_batch([x], 1)
        count = _count_of(pipeline, number, x, y) if verb == "evaluate" else None
        if not self._shown:  # nothing is cut before the first batch has been weighed
            with self.context(), WrittenBuffers([pipeline.cut.model]).restored():
                return call(pipeline.cut.model, x), count
        end = None
        for worker in self._shown:
            end = worker.predict(number, (x, count), self._states[worker.stage.index])
        return end

    def everywhere(self, value: Callable[[], Any]) -> Any:
        """What the process with the last stage computes, in all processes of its row."""
        return self._pipeline.engine.share_result(value) if self._shown else value()


@contextmanager
def passes(pipeline: "Pipeline", of: "Whose" = "average") -> Iterator[Passes]:
    """Within, batches run through the newest weights; all processes enter and leave together."""
    model = pipeline.cut.model
    with (
        pipeline.following(),
        # Nobody else waits for what an error in one process leaves undone.
        pipeline.stopping_on_error(alone=False),
        pipeline.engine.between_steps(),
        keep_modes(model),
        torch.no_grad(),
    ):
        model.eval()
        yield Passes(pipeline, of)


def evaluate(
    pipeline: "Pipeline",
    loader: Iterable[Nest],
    metrics: Mapping[str, Metric],
    *,
    of: "Whose",
) -> Evaluation:
    setup = pipeline.setup
    with passes(pipeline, of) as over:
        score = Score(setup.loss, over.context, metrics, is_sum=setup.weight.is_sum)
        for x, y in pairs_of(loader, "evaluate"):
            end = over.run(x, y, verb="evaluate")
            if end is not None:
                score.add(end[0], x, y, end[1])
        return Evaluation(**over.everywhere(lambda: asdict(score.result())))


def predict(pipeline: "Pipeline", loader: Iterable[Nest], *, of: "Whose") -> list[Nest]:
    """The outputs, batch by batch, in all processes."""
    with passes(pipeline, of) as over:
        return [predict_one(over, x) for x, _ in pairs_of(loader, "predict")]


def predict_one(over: Passes, x: Nest) -> Nest:
    end = over.run(x, None, verb="predict")

    def output() -> Nest:
        assert end is not None
        found = rid_of_kinds(end[0])
        stranger = nest.stranger(found)
        if stranger is not None:
            raise BatchError(
                f"the model returned a {type(stranger).__name__}, which cannot travel between"
                " processes: let it return tensors in tuples, lists and dicts."
            )
        return found

    return over.everywhere(output)


def _count_of(pipeline: "Pipeline", number: int, x: Nest, y: Nest) -> float | None:
    """What a batch counts, where the first stage is; None for its rows."""
    weight = pipeline.setup.weight
    if not pipeline.engine.placement.holds_first or weight.kind(x) in ("rows", "sum"):
        return None
    (count,) = counts_of(weight, [(x, y)], f"batch {number} of evaluate()")
    return count
