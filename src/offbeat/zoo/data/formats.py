"""The files as their authors publish them: IDX, CIFAR's two kinds of batches, packed or not."""

import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.zoo.data.finding import checksum, damaged

Bytes = NDArray[np.uint8]

_PACKING_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, KeyError)
_CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR_ROW = 3 * 32 * 32
_CIFAR_MD5 = {  # of the Python batches, as published
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}


def unpacked(path: Path, member: str | None = None) -> bytes:
    """What a file holds, whether plain or packed by gzip, xz or zip (``member``: which part)."""
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            return gzip.decompress(raw)
        if raw.startswith(b"\xfd7zXZ\x00"):
            return lzma.decompress(raw)
        if raw.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                return archive.read(member or archive.namelist()[0])
        return raw
    except _PACKING_ERRORS as error:
        raise _unreadable(path, error) from error


def read_idx(path: Path, dimensions: int) -> Bytes:
    """An array of bytes in LeCun's IDX format, gzipped or not."""
    raw = unpacked(path)
    head = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) < head:
        raise damaged(
            path,
            f"its first bytes are {raw[:4].hex(' ')}, those of an IDX file with {dimensions}"
            f" dimensions are 00 00 08 {dimensions:02x}",
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:head])
    expected = head + int(np.prod(shape))
    if len(raw) != expected:
        raise damaged(path, f"{len(raw):,} bytes unpacked instead of {expected:,}")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def read_cifar(path: Path) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Training images and labels, test images and labels, of a folder or an archive of either kind.

    The binary batches (``data_batch_1.bin``) or the Python ones (``data_batch_1``).
    """
    found: dict[str, tuple[Bytes, Bytes]] = {}
    for name, raw in _members(path):
        place = path / name if path.is_dir() else path
        stem = name.removesuffix(".bin")
        read = _binary if name.endswith(".bin") else _pickled
        found[stem] = read(raw, place)
        if read is _pickled and len(found[stem][1]) == 10_000:
            is_md5 = checksum(raw, "md5:")
            if is_md5 != _CIFAR_MD5[stem]:
                raise damaged(place, f"checksum {is_md5} of {stem} instead of {_CIFAR_MD5[stem]}")
    missing = [name for name in (*_CIFAR_TRAIN, "test_batch") if name not in found]
    if missing:
        raise damaged(path, f"{', '.join(missing)} not in it")
    train = [found[name] for name in _CIFAR_TRAIN]
    images = np.concatenate([images for images, _ in train])
    labels = np.concatenate([labels for _, labels in train])
    return images, labels, *found["test_batch"]


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    stems = {*_CIFAR_TRAIN, "test_batch"}
    wanted = stems | {f"{stem}.bin" for stem in stems}
    if path.is_dir():
        for batch in sorted(path.iterdir()):
            if batch.name in wanted:
                yield batch.name, batch.read_bytes()
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                file = archive.extractfile(member) if name in wanted else None
                if file is not None:
                    yield name, file.read()
    except (*_PACKING_ERRORS, tarfile.TarError) as error:
        raise _unreadable(path, error) from error


def _binary(raw: bytes, place: Path) -> tuple[Bytes, Bytes]:
    row = 1 + _CIFAR_ROW
    if not raw or len(raw) % row:
        raise damaged(place, f"{len(raw):,} bytes instead of a multiple of {row:,} (30,730,000)")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, row)
    return rows[:, 1:].reshape(-1, 3, 32, 32), _classes(rows[:, 0], place)


def _pickled(raw: bytes, place: Path) -> tuple[Bytes, Bytes]:
    try:
        batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
        images, labels = batch[b"data"], np.asarray(batch[b"labels"])
        images = np.asarray(images, np.uint8).reshape(-1, 3, 32, 32)
    except ConfigurationError as error:
        raise damaged(place, str(error)) from error
    except Exception as error:  # broken pickles raise nearly anything
        raise _unreadable(place, error) from error
    if len(images) != len(labels):
        raise damaged(place, f"{len(images)} images and {len(labels)} labels")
    return images, _classes(labels, place)


def _classes(labels: NDArray[Any], place: Path) -> Bytes:
    if labels.min(initial=0) < 0 or labels.max(initial=0) > 9:
        raise damaged(place, f"a label is {labels.max()}, the classes are 0 to 9")
    return labels.astype(np.uint8)


class _ArraysOnly(pickle.Unpickler):
    """Reads plain types and NumPy arrays; a pickle that asks for anything else is refused.

    The two constructors are our own, so old pickles load without NumPy's warnings about them.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: np.ndarray((0,), np.uint8)  # its state is set by the next opcode
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return lambda kind, *_: np.dtype(kind.decode() if isinstance(kind, bytes) else kind)
        raise ConfigurationError(f"it asks to run {module}.{name}, and batches hold arrays alone")


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    size = path.stat().st_size if path.is_file() else 0
    return damaged(path, f"{type(error).__name__}: {error} (the file has {size:,} bytes)")
