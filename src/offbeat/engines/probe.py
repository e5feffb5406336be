"""The probe: one batch's gradient at the weights in use and at the newest, compared per stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offbeat import nest
from offbeat.engines.setup import Setup
from offbeat.engines.worker import Worker
from offbeat.nest import Nest
from offbeat.rng import seeded
from offbeat.stages.network import precision
from offbeat.stages.stage import Stage
from offbeat.stages.trial import keep_modes
from offbeat.transport.base import Key

if TYPE_CHECKING:
    from offbeat.engines.pipeline import Pipeline

_PROBE = -2
"""The micro-batch by which the probe's dropout is keyed."""


@dataclass(frozen=True)
class _Pass:
    """One forward through a stage, and what its backward needs."""

    weights: list[Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor]
    sent: Nest


def probe(pipeline: "Pipeline", x: Nest, y: Nest) -> dict[int, float]:
    """Per stage of a replica the cosine, which is also noted among the readings."""
    engine = pipeline.engine
    with (
        pipeline.stopping_on_error(alone=False),
        keep_modes(pipeline.cut.model),
        torch.enable_grad(),
    ):
        shown = engine.shown_workers()
        own = dict(_cosines(shown, pipeline.setup, engine.ask(), x, y))
        for stage in (worker.stage for worker in shown if worker.stage.index in own):
            value = own[stage.index]
            engine.readings.record("cosine", stage.index, stage.replica, stage.version, value)
        row = engine.share_in_row("cosines", list(own.items()))
        return {stage: value for of_process in row for stage, value in sorted(of_process)}


def _cosines(
    workers: Sequence[Worker], setup: Setup, number: int, x: Nest, y: Nest
) -> Iterator[tuple[int, float]]:
    """Per stage of this process the cosine of the probe's stale and fresh gradients.

    Stale is the point that the next gradient to be applied was computed at: at each stage the
    weights that its forward read. Nothing of the training is touched: weights and buffers are
    lent to the modules as arguments. All processes of a row must ask together.
    """
    passes: dict[int, list[_Pass]] = {}
    for worker in workers:
        stage, index = worker.stage, worker.stage.index
        given = [x, x]
        if index > 0:
            given = worker.transport.receive(Key("probe", index, number))
        points = [None, stage.corrector.stale_weights()]
        passes[index] = [
            _forward(stage, setup, point, part) for point, part in zip(points, given, strict=True)
        ]
        if not worker.is_last:
            sent = [one.sent for one in passes[index]]
            worker.transport.send(Key("probe", index + 1, number), sent)
    for worker in reversed(workers):
        index = worker.stage.index
        if worker.is_last:
            starts: list[list[Tensor | None]] = [[None], [None]]
            ends = [[setup.loss(one.sent, y)] for one in passes[index]]
        else:
            starts = worker.transport.receive(Key("probe-gradient", index, number))
            ends = [one.outputs for one in passes[index]]
        found = [
            _backward(one, end, start)
            for one, end, start in zip(passes[index], ends, starts, strict=True)
        ]
        if index > 0:
            down = [below for _, below in found]
            worker.transport.send(Key("probe-gradient", index - 1, number), down)
        if found[0][0].numel():
            yield index, float(torch.cosine_similarity(found[0][0], found[1][0], dim=0))


def _forward(
    stage: Stage, setup: Setup, point: Mapping[nn.Parameter, Tensor] | None, given: Nest
) -> _Pass:
    """``point``: the weights to go by, those of frozen parameters too; None for the newest."""
    trainable = [p for p in stage.module.parameters() if p.requires_grad]
    values = trainable if point is None else [point[p] for p in trainable]
    leaves = [value.detach().requires_grad_() for value in values]
    by_id = {id(p): leaf for p, leaf in zip(trainable, leaves, strict=True)}
    lent = {name: by_id[id(p)] for name, p in stage.module.named_parameters() if id(p) in by_id}
    lent |= {name: buffer.clone() for name, buffer in stage.module.named_buffers()}
    inputs = nest.replace(given, lambda t: t.detach().requires_grad_(t.is_floating_point()))
    seed = stage.network.seed_of(_PROBE)
    host = stage.habits.draws is True
    with seeded(seed, setup.device, host=host), precision(setup.device, setup.autocast):
        fed = nest.replace(inputs, lambda t: t.clone())  # the stage may write to it
        output = functional_call(stage.module, lent, (fed,))
    return _Pass(leaves, nest.tensors(inputs), nest.tensors(output), output)


def _backward(
    one: _Pass, ends: Sequence[Tensor], starts: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor | None]]:
    """The stage's gradient as one row, and the gradients of its inputs."""
    pairs = [
        (end, start)
        for end, start in zip(ends, starts, strict=True)
        if end.requires_grad and (start is not None or len(ends) == 1)
    ]
    wanted = [*one.weights, *(t for t in one.inputs if t.requires_grad)]
    found: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if wanted and pairs:
        found = torch.autograd.grad(
            [end for end, _ in pairs], wanted, [start for _, start in pairs], allow_unused=True
        )
    own = [
        torch.zeros_like(w) if g is None else g
        for w, g in zip(one.weights, found[: len(one.weights)], strict=True)
    ]
    left = iter(found[len(one.weights) :])
    below = [next(left) if t.requires_grad else None for t in one.inputs]
    return torch.cat([g.to_dense().reshape(-1) for g in own]) if own else torch.zeros(0), below
