"""Older actions of a ledger, in files beside the checkpoints of a run.

A file has rows of 49 bytes, little-endian, in the order in which the actions ended: kind (one
letter), stage (int32), batch, version (int64), start, end in seconds, loss (float64), replica
(int32). Each life of a process writes one; a checkpoint says how many rows of which are its own.
"""

import hashlib
import os
import secrets
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from offbeat.errors import StorageError
from offbeat.records import disk
from offbeat.records.tally import Line

FORM = "biqqdddi"
_ROW = struct.Struct("<" + FORM)
_AT_ONCE = 4096


@dataclass(frozen=True)
class Part:
    """The beginning of a file."""

    path: str
    rows: int
    sha256: str
    """Of these rows."""
    shift_s: float = 0.0
    """To be added to its times."""
    only: Sequence[Sequence[int]] | None = None
    """The lines of which it has all that there is to read, by replica and stage; None: all."""

    def chunks(self) -> Iterator[bytes]:
        """Whole rows, many at once."""
        left = self.rows
        with disk.reading(Path(self.path)) as file:
            while left:
                data = file.read(min(left, _AT_ONCE) * _ROW.size)
                rows = len(data) // _ROW.size
                if not rows:
                    raise StorageError(f"{self.path} has lost {left} of its {self.rows} rows")
                left -= rows
                yield data[: rows * _ROW.size]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for data in self.chunks():
            for kind, stage, batch, version, start, end, loss, replica in _ROW.iter_unpack(data):
                if self.only is None or [replica, stage] in self.only:
                    times = start + self.shift_s, end + self.shift_s
                    yield (kind, stage, batch, version, *times, loss, replica)

    def moved(
        self, folder: Path | None, shift_s: float, only: Collection[Line] | None = None
    ) -> "Part":
        """As it is now: where its folder may have been moved, and on another clock."""
        path = self.path if folder is None else str(folder / Path(self.path).name)
        path = path if os.path.exists(path) else self.path
        lines = self.only
        if only is not None:
            lines = [list(one) for one in only if lines is None or list(one) in lines]
        return replace(self, path=path, shift_s=self.shift_s + shift_s, only=lines)

    def words(self) -> dict[str, Any]:
        return asdict(self)

    def cut_back(self) -> None:
        """Takes away what was written after the checkpoint from which a run goes on."""
        path = Path(self.path)
        if path.is_file() and not path.is_symlink():
            size = self.rows * _ROW.size
            if path.stat().st_size > size:
                os.truncate(path, size)


class RowFile:
    """The file of this life."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"ledger-{secrets.token_hex(8)}.rows"
        self._file: disk.Growing | None = None
        self._digest = hashlib.sha256()
        self._rows = 0

    def add(self, columns: list[Any]) -> None:
        """Raises a StorageError where there is no room; then it is as it was."""
        if self._file is None:
            self._file = disk.Growing(self._path)
        count = len(columns[0])
        data = struct.pack("<" + FORM * count, *chain.from_iterable(zip(*columns, strict=True)))
        self._file.add(data)
        self._digest.update(data)
        self._rows += count

    def settle(self) -> None:
        if self._file is not None:
            self._file.settle()

    def part(self) -> Part:
        return Part(str(self._path), self._rows, self._digest.hexdigest())
