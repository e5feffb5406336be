"""Batches on their way to the stages that need them: checked, divided, handed out."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from offbeat import nest
from offbeat.averaging.sharding import shards_of
from offbeat.engines.guests import check_keys
from offbeat.engines.shares import WHOLE, counts_of, portions, refuse_empty, rows_of
from offbeat.engines.worker import Target
from offbeat.errors import BatchError
from offbeat.nest import Nest
from offbeat.schedules.schedule import Schedule
from offbeat.transport.base import Key

if TYPE_CHECKING:
    from offbeat.engines.pipeline import Pipeline


class Shard(NamedTuple):
    """What one replica of this process trains on."""

    x: Nest
    y: Nest
    counts: Sequence[float] | None = None
    """What each part counts; None where nobody asks, or all is one part."""


def divide(pipeline: "Pipeline", schedule: Schedule, x: Nest, y: Nest) -> list[Shard]:
    """The batch as one part per replica of this process; refused before anything has begun."""
    placement, parts = pipeline.engine.placement, schedule.micro_batches
    inputs, targets = nest.tensors(x), nest.tensors(y)
    if placement.holds_first and not inputs:
        raise BatchError(f"x is a {type(x).__name__} without a tensor in it: give tensors.")
    tensors = [*inputs, *targets]
    check_devices(tensors, pipeline.setup.device)
    if torch.is_autocast_enabled(pipeline.setup.device.type):
        raise BatchError(
            "step() was called inside torch.autocast, whose weight cache would outlive an update."
            " Leave the context and give Trainer(autocast=torch.bfloat16)."
        )
    if torch.is_inference_mode_enabled():
        raise BatchError(
            "step() was called inside torch.inference_mode, where nothing can be trained. Leave"
            " the context."
        )
    if any(tensor.is_inference() for tensor in tensors):
        raise BatchError(
            "the batch was made inside torch.inference_mode, and no gradient can go through it:"
            " give x.clone(), or make it outside."
        )
    here = len(placement.replicas_here)
    shards = [Shard(x, y)]
    if here > 1:
        shards = list(map(Shard, shards_of(x, here), shards_of(y, here)))
        tensors = nest.tensors([shards[0].x, shards[0].y])
    come_in_parts = any(_check_parts(part, parts) for shard in shards for part in shard[:2])
    if tensors and not come_in_parts:
        _check_rows(tensors, parts, pipeline)
    if placement.holds_first:
        for part in map(first_part, (shard.x for shard in shards)):
            if isinstance(part, Mapping):
                check_keys(pipeline.cut.model, part)
        pipeline.cut.check_batch([shard.x for shard in shards], parts)
    own_labels = y is None and (isinstance(x, Mapping) or not placement.holds_first)
    if placement.holds_last and parts > 1 and not targets and not own_labels:
        raise BatchError(
            f"y is a {type(y).__name__} without a tensor in it, and it is to be split into"
            f" {parts} micro-batches: give a tensor with a row per row of x. The batch was not"
            " started."
        )
    if placement.holds_first and (parts > 1 or pipeline.setup.replicas > 1):
        counts = [_counts(pipeline, shard, parts) for shard in shards]
        refuse_empty(pipeline, counts)
        shards = [shard._replace(counts=own) for shard, own in zip(shards, counts, strict=True)]
    return shards


def _check_parts(batch: Nest, parts: int) -> bool:
    """Whether it comes in its parts; refused if there are not as many as the method has."""
    if isinstance(batch, nest.Parts) and len(batch) != parts:
        raise BatchError(
            f"the batch comes in {len(batch)} parts, and the method makes {parts} of every batch:"
            f" give {parts}. The batch was not started."
        )
    return isinstance(batch, nest.Parts)


def first_part(batch: Nest) -> Nest:
    """What stages are made from and a model is called with: a batch, or a part that came alone."""
    return batch[0] if isinstance(batch, nest.Parts) else batch


def _counts(pipeline: "Pipeline", shard: Shard, parts: int) -> Sequence[float]:
    # A target may be without tensors if nothing is split.
    pieces = [nest.split(part, parts) for part in (shard.x, shard.y)]
    return counts_of(pipeline.setup.weight, list(zip(*pieces, strict=True)), "a batch")


def pairs_of(loader: Iterable[Nest], verb: str) -> Iterator[tuple[Nest, Nest]]:
    """The batches of a loader; what is no (x, y) is refused.

    A mapping is x, with labels of its own if it has any; predict() needs no y.
    """
    words = f"{verb}() takes a loader of (x, y) pairs, or of dicts; for one batch give [(x, y)]"
    if isinstance(loader, Mapping):
        raise BatchError(f"{words}, or [batch]. It got one {type(loader).__name__}.")
    try:
        batches = iter(loader)
    except TypeError:
        raise BatchError(f"{words}. It got a {type(loader).__name__}.") from None
    for number, batch in enumerate(batches):
        if isinstance(batch, Mapping) or (verb == "predict" and isinstance(batch, Tensor)):
            yield nest.plain(batch), None
            continue
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            found = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise BatchError(f"{words}. Entry {number} is a {type(batch).__name__}{found}.")
        yield nest.plain(batch[0]), nest.plain(batch[1])


def check_devices(tensors: Sequence[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != device:
            raise BatchError(
                f"the batch is on {tensor.device}, the model on {device}: move one of them, for"
                f" example x.to({str(device)!r})."
            )


def _check_rows(tensors: Sequence[Tensor], parts: int, pipeline: "Pipeline") -> None:
    """Whether a batch can be split into micro-batches; tensors of x and y are split alike."""
    sizes = [tensor.size(0) if tensor.dim() else 1 for tensor in tensors]
    rows = sizes[0]
    if rows < parts:
        by_auto = pipeline.setup.course.plan is not None
        instead = f"method=Auto(batch={rows})" if by_auto else "lower accumulate or micro_batches"
        raise BatchError(
            f"a batch of {rows} rows cannot make {parts} micro-batches for {pipeline.method}: give"
            f" at least {parts} rows, or {instead}. The batch was not started."
        )
    uneven = set(sizes) - {rows}
    if parts > 1 and uneven:
        raise BatchError(
            f"x has {rows} rows and another tensor of the batch {min(uneven)}: to split a batch"
            " into micro-batches all tensors of x and y need the same first size."
        )


def warn_of_small_parts(pipeline: "Pipeline", shard: Shard) -> None:
    """Of a first batch whose size "auto" did not know."""
    plan, parts = pipeline.setup.course.plan, pipeline.schedule.micro_batches
    tensors = nest.tensors([shard.x, shard.y])
    rows = rows_of(tensors) if tensors else 0
    if plan is not None and parts > 1 and rows and rows // parts < plan.least_rows:
        warnings.warn(
            f"auto: a batch of {rows} rows in {parts} parts leaves {rows // parts} in a part, where"
            f" it would keep at least {plan.least_rows}. Give method=Auto(batch={rows}).",
            stacklevel=3,
        )


def hand_out(pipeline: "Pipeline", schedule: Schedule, shards: Sequence[Shard]) -> None:
    """Sends every stage here that needs it its replica's part, in micro-batches."""
    placement, parts = pipeline.engine.placement, schedule.micro_batches
    numbers = pipeline.position.add_batch(parts)
    replicas = placement.replicas_here
    fed = [[WHOLE]]
    counts = [shard.counts for shard in shards if shard.counts is not None]
    if counts:
        fed = portions(pipeline, pipeline.setup.weight.kind(shards[0].x), counts)
    for worker in pipeline.engine.workers:
        place = replicas.index(worker.stage.replica)
        x, y, _ = shards[place]
        # Both ends were fed by one caller where all stages are here.
        checksum = None if placement.is_whole or y is None else checksum_of(y)
        index, transport = worker.stage.index, worker.transport
        if index == 0:
            rows = zip(numbers, nest.split(x, parts), fed[place], strict=True)
            for number, part, portion in rows:
                transport.send(Key("activation", 0, number), (part, checksum, tuple(portion)))
        if index == placement.stages - 1 or schedule.local_losses:
            for number, target in zip(numbers, nest.split(y, parts), strict=True):
                transport.send(Key("target", index, number), Target(target, checksum))


def checksum_of(values: Nest) -> int:
    """A number that tells two batches apart: every byte of every tensor, in order."""
    checksum = 0
    for tensor in nest.tensors(values):
        flat: Tensor = tensor.detach().cpu().contiguous().reshape(-1)
        checksum = crc32(flat.view(torch.uint8).numpy().data, checksum)
    return checksum


def length_of(loader: Iterable[Nest]) -> int | None:
    """How many batches it has, if it knows: a DataLoader of an IterableDataset has a len() too."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
