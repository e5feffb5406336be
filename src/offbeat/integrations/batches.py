"""From micro-batches of their loop to the parts of one batch of stages."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from offbeat.errors import BatchError
from offbeat.nest import Nest, Parts, plain, replace

Micro = tuple[dict[str, Any], Any]
"""Inputs, and how many items count in all micro-batches of the update."""


def parts_of(
    micros: Sequence[Micro],
    arguments: Callable[[dict[str, Any], Any], dict[str, Any]],
    replicas: int,
    count: int,
    *,
    accumulates: bool,
) -> tuple[Nest, Nest]:
    """What ``step`` takes: x, the arguments of the model, and y, what its loss needs.

    ``count``: the parts that the method makes. If their loop ``accumulates``, they are its
    micro-batches, else the rows of one. Where there are fewer, at the end of an epoch, copies that
    count nothing fill up. ``replicas``: of this process; each gets its rows.
    """
    shards = [_rows_of(plain(dict(inputs)), replicas, "replicas") for inputs, _ in micros]
    found = []
    for replica in range(replicas):
        own = [(shard[replica], items) for shard, (_, items) in zip(shards, micros, strict=True)]
        parts = [(inputs, items, 1.0, True) for inputs, items in own]
        if not accumulates:
            ((inputs, items),) = own
            rows = _count_rows(inputs)
            pieces = _rows_of(inputs, min(rows, count), "parts")
            parts = [(piece, items, _count_rows(piece) / rows, True) for piece in pieces]
        parts += [(*own[0], 1.0, False)] * (count - len(parts))
        xs = Parts(arguments(inputs, items) for inputs, items, _, _ in parts)
        ys = Parts(
            {
                "inputs": inputs,
                "num_items_in_batch": items,
                "parts": len(micros),
                "share": share,
                "counts": counts,
            }
            for inputs, items, share, counts in parts
        )
        found.append((xs, ys) if count > 1 else (xs[0], ys[0]))
    if replicas == 1:
        return found[0]
    return Parts(x for x, _ in found), Parts(y for _, y in found)


def _count_rows(inputs: dict[str, Any]) -> int:
    return next((t.size(0) for t in inputs.values() if isinstance(t, Tensor) and t.dim()), 1)


def _rows_of(inputs: dict[str, Any], parts: int, what: str) -> list[dict[str, Any]]:
    """The inputs cut into so many by their rows; what has no rows goes to each."""
    if parts == 1:
        return [inputs]
    rows = _count_rows(inputs)
    if rows < parts or (what == "replicas" and rows % parts):
        raise BatchError(
            f"a batch of {rows} rows cannot be divided among {parts} {what}: give"
            " dataloader_drop_last=True, or another per_device_train_batch_size."
        )

    def piece(number: int) -> dict[str, Any]:
        def own(tensor: Tensor) -> Tensor:
            whole = tensor.dim() and tensor.size(0) == rows
            return tensor.tensor_split(parts)[number] if whole else tensor

        return {name: replace(value, own) for name, value in inputs.items()}

    return [piece(number) for number in range(parts)]
