"""Batches on their way to the stages that need them: checked, divided, handed out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat import nest
from offbeat.averaging.sharding import shards_of
from offbeat.engines import checks
from offbeat.engines.worker import Target
from offbeat.errors import BatchError
from offbeat.nest import Nest
from offbeat.transport.base import Key

if TYPE_CHECKING:
    from offbeat.engines.pipeline import Pipeline

Shard = tuple[Nest, Nest]
"""What one replica of this process trains on."""


def divide(pipeline: "Pipeline", x: Nest, y: Nest) -> list[Shard]:
    """The batch as one part per replica of this process; refused before anything has begun."""
    placement, device = pipeline.engine.placement, pipeline.setup.device
    if placement.holds_first and not nest.tensors(x):
        raise BatchError(f"x is a {type(x).__name__} without a tensor in it: give tensors.")
    checks.check_devices([x, y], device)
    checks.check_outside_autocast(device)
    here = len(placement.replicas_here)
    shards = [(x, y)]
    if here > 1:
        shards = list(zip(shards_of(x, here), shards_of(y, here), strict=True))
    parts = pipeline.schedule.micro_batches
    if nest.tensors([x, y]):
        by_auto = pipeline.setup.course.plan is not None
        checks.check_rows(list(shards[0]), parts, pipeline.method, by_auto=by_auto)
    if placement.holds_first:
        pipeline.cut.check_batch([x for x, _ in shards], parts)
    if placement.holds_last and parts > 1 and not nest.tensors(y):
        raise BatchError(
            f"y is a {type(y).__name__} without a tensor in it, and it is to be split into"
            f" {parts} micro-batches: give a tensor with a row per row of x. The batch was not"
            " started."
        )
    return shards


def warn_of_small_parts(pipeline: "Pipeline", shards: Sequence[Shard]) -> None:
    plan = pipeline.setup.course.plan
    if plan is not None:
        checks.warn_of_small_parts(shards[0], pipeline.schedule.micro_batches, plan)


def first_of(pipeline: "Pipeline", shards: Sequence[Shard]) -> Nest:
    """What the stages are made from."""
    first, _ = shards[0]
    return pipeline.cut.sample(first, pipeline.schedule.micro_batches)


def hand_out(pipeline: "Pipeline", shards: Sequence[Shard]) -> None:
    """Sends every stage here that needs it its replica's part, in micro-batches."""
    placement, schedule = pipeline.engine.placement, pipeline.schedule
    parts = schedule.micro_batches
    numbers = pipeline.position.add_batch(parts)
    replicas = placement.replicas_here
    summed = pipeline.method.sums_gradients
    for worker in pipeline.engine.workers:
        x, y = shards[replicas.index(worker.stage.replica)]
        # Both ends were fed by one caller where all stages are here.
        checksum = None if placement.is_whole or y is None else checks.checksum_of(y)
        index, transport = worker.stage.index, worker.transport
        if index == 0:
            for number, part in zip(numbers, nest.split(x, parts), strict=True):
                transport.send(Key("activation", 0, number), (part, checksum))
        if index == placement.stages - 1 or schedule.local_losses:
            for number, target in zip(numbers, _targets(y, checksum, parts, summed), strict=True):
                transport.send(Key("target", index, number), target)


def _targets(y: Nest, checksum: int | None, parts: int, summed: bool) -> list[Target]:
    if parts == 1:
        return [Target(y, checksum=checksum)]
    pieces = nest.split(y, parts)
    rows = [checks.rows_of(piece) for piece in pieces]
    shares = [count / sum(rows) for count in rows]
    return [
        Target(piece, 1.0 if summed else share, share, checksum)
        for piece, share in zip(pieces, shares, strict=True)
    ]
