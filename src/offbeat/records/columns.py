"""Many small entries as columns of plain numbers, so that recording can stay on in long runs."""

import json
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from offbeat.errors import ConfigurationError
from offbeat.records import disk

Entry = TypeVar("Entry", bound=tuple[Any, ...])


class Columns(Generic[Entry]):
    """Entries of one kind, one array per field: some 50 bytes an entry."""

    entry: ClassVar[Any]
    """The named tuple."""
    types: ClassVar[str]
    """Of its fields in their order, a letter each, as :mod:`array` calls them. Exact checkpoints
    hold the columns' bytes, so another order or type makes them unreadable."""
    word: ClassVar[str]
    """The field that is one of a few words."""
    codes: ClassVar[Mapping[Any, int]]
    """The number that stands for each of these words."""
    noun: ClassVar[str]
    """What an entry is called, and what the whole is called at the trainer: for messages."""
    name: ClassVar[str]

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._arrays: list[array[Any]] = [array(kind) for kind in self.types]
        self._word = self.entry._fields.index(self.word)
        self._adders = tuple(column.append for column in self._arrays)
        self._words = {code: word for word, code in self.codes.items()}
        for entry in entries:
            self.append(entry)

    def column(self, field: str) -> "array[Any]":
        """All values of a field; the word as a number."""
        place: int = self.entry._fields.index(field)
        return self._arrays[place]

    def append(self, entry: Entry) -> None:
        numbers = list(entry)
        numbers[self._word] = self.codes[numbers[self._word]]
        self._append(numbers)

    def _append(self, numbers: Sequence[Any]) -> None:
        for add, number in zip(self._adders, numbers, strict=True):
            add(number)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Entry:
        return self._read([column[index] for column in self._arrays])

    def __iter__(self) -> Iterator[Entry]:
        return map(self._read, map(list, zip(*self._arrays, strict=True)))

    def _read(self, numbers: list[Any]) -> Entry:
        numbers[self._word] = self._words[numbers[self._word]]
        entry: Entry = self.entry(*numbers)
        return entry

    def at(self, stage: int, replica: int = 0) -> Iterator[Entry]:
        """The entries of one stage of one replica."""
        places = zip(self.column("stage"), self.column("replica"), strict=True)
        return (self[index] for index, place in enumerate(places) if place == (stage, replica))

    def only(self, places: Collection[tuple[int, int]]) -> Self:
        """The entries of some stages, each named by its replica and number."""
        found = zip(self, self.column("replica"), self.column("stage"), strict=True)
        return type(self)(entry for entry, *place in found if tuple(place) in places)

    def to_bytes(self) -> bytes:
        """All entries, column by column, for a reader that can trust the writer's numbers."""
        return b"".join(column.tobytes() for column in self._arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        columns = cls()
        columns.add_bytes(data)
        return columns

    def add_bytes(self, data: bytes) -> None:
        """Appends what :meth:`to_bytes` gave, here or in another process."""
        count = len(data) // sum(column.itemsize for column in self._arrays)
        for column in self._arrays:
            size = count * column.itemsize
            column.frombytes(data[:size])
            data = data[size:]

    def go_on_from(self, data: bytes) -> None:
        """Takes what :meth:`to_bytes` gave in place of everything so far."""
        for column in self._arrays:
            del column[:]
        self.add_bytes(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one JSON object per line, which :meth:`load` reads."""
        lines = (f"{json.dumps(self._to_json(entry))}\n".encode() for entry in self)
        disk.write(Path(path), lines)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        columns = cls()
        try:
            for line in Path(path).read_text().splitlines():
                columns.append(cls._from_json(json.loads(line)))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ConfigurationError(
                f"{path}, line {len(columns) + 1}: not {cls.noun} ({error}). Give a file"
                f" written by trainer.{cls.name}.save(...)."
            ) from None
        return columns

    def _to_json(self, entry: Entry) -> dict[str, Any]:
        return dict(zip(self.entry._fields, entry, strict=True))

    @classmethod
    def _from_json(cls, words: Any) -> Entry:
        entry: Entry = cls.entry(**words)
        return entry
