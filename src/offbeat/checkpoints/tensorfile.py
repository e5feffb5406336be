"""Plain values and tensors in one file, laid out as safetensors: nothing in it can be code.

    8 bytes     length of the header
    header      JSON: where each stretch of memory lies, and the value in words
    stretches   raw bytes

Tensors are views of stretches, so what shared memory when it was written shares it when it is read,
with the same strides. Of a large storage only the parts that some tensor sees are written.
"""

import errno
import hashlib
import io
import json
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from offbeat import nest
from offbeat.errors import CheckpointError
from offbeat.records import disk

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 22
_ALIGNED = 64
"""A stretch begins at a multiple of this in its storage, so that any type can view it."""


def write(path: Path, value: Any) -> dict[str, Any]:
    """Writes a value and waits until it is on disk; returns what :func:`examine` will find."""
    return write_chunks(path, _chunks(*_packed(value)))


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, count = hashlib.sha256(), 0
    with disk.writing(path, _Straight) as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(memoryview(chunk))
            count += len(chunk)
    return {"bytes": count, "sha256": digest.hexdigest()}


class _Straight:
    """A new file that goes straight to the disk where it can, not through the page cache.

    Nobody reads a checkpoint soon, and filling the cache with one costs training, which goes on
    meanwhile, more than twice as much processor time (benchmarks/faults).
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._direct: int = getattr(os, "O_DIRECT", 0)
        try:
            self._file = os.open(path, flags | self._direct, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system says that cannot
                raise
            self._direct = 0
            self._file = os.open(path, flags, 0o666)
        # The disk reads from memory that begins at a page, in whole blocks.
        self._buffer = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
        self._filled = 0

    def write(self, data: memoryview) -> None:
        while data:
            part = data[: _CHUNK_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == _CHUNK_BYTES:
                self._put(self._buffer)
                self._filled = 0

    def flush(self) -> None:
        """The rest, which is no whole number of blocks; the last that is written."""
        self._go_through_the_cache()
        self._put(self._buffer[: self._filled])

    def fileno(self) -> int:
        return self._file

    def __enter__(self) -> "_Straight":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _put(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_through_the_cache()

    def _go_through_the_cache(self) -> None:
        if self._direct:
            import fcntl  # there is no O_DIRECT where there is no such module

            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~self._direct)
            self._direct = 0


def examine(path: Path) -> dict[str, Any]:
    """Size and digest of a file as it lies there now."""
    digest, count = hashlib.sha256(), 0
    with disk.reading(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            count += len(chunk)
    return {"bytes": count, "sha256": digest.hexdigest()}


def read(path: Path) -> Any:
    """Reads what :func:`write` wrote; tensors arrive on the CPU."""
    with disk.reading(path) as file:
        try:
            return _read(file, os.fstat(file.fileno()).st_size)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, struct.error):
            raise CheckpointError(
                f"{path} is not a file of offbeat's, or it is damaged: use another checkpoint."
            ) from None


def to_bytes(value: Any) -> bytes:
    """What :func:`write` would write."""
    return b"".join(_chunks(*_packed(value)))


def from_bytes(data: bytes) -> Any:
    return _read(io.BytesIO(data), len(data))


def _read(file: BinaryIO, size: int) -> Any:
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if length > size:
        raise ValueError("the header would be longer than the file")
    header = json.loads(file.read(length))
    words = json.loads(header.pop("__metadata__")["value"])
    stretches = [_read_stretch(file, entry) for entry in header.values()]
    return nest.from_words(words["value"], [_tensor(view, stretches) for view in words["views"]])


def _read_stretch(file: BinaryIO, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    stretch = torch.empty(end - begin, dtype=torch.uint8)
    if end > begin and file.readinto(stretch.numpy()) != end - begin:  # type: ignore[attr-defined]
        raise ValueError("the file ends early")
    return stretch


def _packed(value: Any) -> tuple[bytes, list[Tensor]]:
    tensors: list[Tensor] = []

    def numbered(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    try:
        words = nest.to_words(value, numbered)
    except nest.NoWords as error:
        raise CheckpointError(
            f"{error} cannot be stored in a checkpoint, which holds dense tensors, numbers, strings"
            " and None in tuples, lists and dicts. If it is in flight between stages, or an"
            " optimizer keeps it for sparse gradients, save with drain=True; if it is the data's"
            " position, give data= plain values."
        ) from None
    stretches = _stretches_of(tensors)
    views = [_view(tensor, stretches) for tensor in tensors]
    entries: dict[str, Any] = {
        "__metadata__": {"value": json.dumps({"views": views, "value": words})}
    }
    place = 0
    for number, stretch in enumerate(stretches):
        entries[f"stretch-{number}"] = {
            "dtype": "U8",
            "shape": [stretch.bytes.numel()],
            "data_offsets": [place, place + stretch.bytes.numel()],
        }
        place += stretch.bytes.numel()
    header = json.dumps(entries).encode()
    return header, [stretch.bytes for stretch in stretches]


def _chunks(header: bytes, stretches: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield _LENGTH.pack(len(header)) + header
    for stretch in stretches:
        memory = memoryview(stretch.cpu().numpy().data)
        for start in range(0, len(memory), _CHUNK_BYTES):
            yield memory[start : start + _CHUNK_BYTES]


# ------------------------------------------------------------------------- tensors as views


@dataclass
class _Stretch:
    storage: int
    begin: int
    end: int
    bytes: Tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor sees, rounded down, and the end."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return begin // _ALIGNED * _ALIGNED, begin // _ALIGNED * _ALIGNED
    last = sum(int((n - 1) * s) for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return begin // _ALIGNED * _ALIGNED, begin + (last + 1) * tensor.itemsize


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _stretches_of(tensors: list[Tensor]) -> list[_Stretch]:
    """The memory behind all tensors, each byte once, without what none of them sees."""
    spans = sorted(((_place(t), *_span(t), i) for i, t in enumerate(tensors)))
    found: list[_Stretch] = []
    for place, begin, end, index in spans:
        last = found[-1] if found else None
        if last is not None and last.storage == place and begin <= last.end:
            last.end = max(last.end, end)
        else:
            found.append(_Stretch(place, begin, end, tensors[index]))
    for stretch in found:
        storage = stretch.bytes.untyped_storage()
        size = (stretch.end - stretch.begin,)
        seen = torch.empty(0, dtype=torch.uint8, device=stretch.bytes.device)
        stretch.bytes = seen.set_(storage, stretch.begin, size)  # type: ignore[call-overload]
    return found


def _view(tensor: Tensor, stretches: list[_Stretch]) -> list[Any]:
    place, (begin, end) = _place(tensor), _span(tensor)
    number = bisect_right(stretches, (place, begin), key=lambda s: (s.storage, s.begin)) - 1
    stretch = stretches[number]
    assert stretch.storage == place
    assert stretch.begin <= begin <= end <= stretch.end
    offset = tensor.storage_offset() - stretch.begin // tensor.itemsize
    size, stride = list(tensor.size()), list(tensor.stride())
    dtype = nest.dtype_name(tensor.dtype)
    return [number, dtype, size, stride, offset, tensor.requires_grad]


def _tensor(view: list[Any], stretches: list[Tensor]) -> Tensor:
    number, dtype, size, stride, offset, grad = view
    return nest.view(stretches[number], dtype, size, stride, offset).requires_grad_(grad)
