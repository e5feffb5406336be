"""Which rows of a batch each replica trains on: the i-th contiguous part."""

from collections.abc import Iterator, Sized

import torch

from offbeat import nest
from offbeat.errors import BatchError, ConfigurationError
from offbeat.methods.base import require_count
from offbeat.nest import Nest


def shards_of(batch: Nest, replicas: int, parts: int | None = None) -> list[Nest]:
    """A batch cut into equal contiguous parts, by default one per replica."""
    if replicas == 1:
        return [batch]
    if isinstance(batch, nest.Parts):
        return list(batch)
    for tensor in nest.tensors(batch):
        rows = tensor.size(0) if tensor.dim() else 1
        if rows % replicas or not tensor.dim():
            raise BatchError(
                f"a batch of {rows} rows does not divide among {replicas} replicas, whose parts are"
                " equal so that all their rows weigh the same. Give a multiple of"
                f" {replicas}, for example with DataLoader(..., drop_last=True). The batch was not"
                " started."
            )
    return nest.split(batch, parts or replicas)


class Sampler:
    """Row numbers for ``DataLoader(data, batch_sampler=...)``: the same rows in any layout.

    In one process every batch is whole. With replicas in processes of their own each gets its part.
    Every pass shuffles anew, by (seed, epoch); ``epoch`` may be set when a run is taken up again.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        replicas: int,
        parts: int,
        part: int,
    ) -> None:
        """``part``: which of so many; of one, batches are whole."""
        require_count("batch_size", batch_size)
        if not isinstance(data, Sized):
            whole = isinstance(data, int) and not isinstance(data, bool)
            if not whole or not 0 <= data < 2**62:
                raise ConfigurationError(
                    f"data={data!r}: give what has a length, or a whole number of rows."
                )
        self.epoch = 0
        self.is_whole = parts == 1
        self._parts, self._part = parts, part
        self._rows = data if isinstance(data, int) else len(data)
        self._size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._drop_last = drop_last
        last = self._rows % batch_size
        if batch_size % replicas or (not drop_last and last % replicas):
            what = (
                f"batch_size={batch_size}" if batch_size % replicas else f"a last batch of {last}"
            )
            raise ConfigurationError(
                f"{what} rows does not divide among {replicas} replicas: give a multiple of"
                f" {replicas}" + (" and drop_last=True." if last % replicas else ".")
            )
        if not len(self):
            raise ConfigurationError(
                f"{self._rows} rows make no batch of {batch_size}: give a smaller batch_size."
            )

    def __len__(self) -> int:
        whole, last = divmod(self._rows, self._size)
        return whole + (last > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._rows)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
            order = torch.randperm(self._rows, generator=generator)
        self.epoch += 1
        for number in range(len(self)):
            batch = order[number * self._size : (number + 1) * self._size]
            yield batch.tensor_split(self._parts)[self._part].tolist()


def is_sharded(loader: object) -> bool:
    """Whether a loader already gives each process its own part."""
    sampler = getattr(loader, "batch_sampler", None)
    return isinstance(sampler, Sampler) and not sampler.is_whole
