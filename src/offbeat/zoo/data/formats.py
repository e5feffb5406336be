"""Reading images: IDX files, CIFAR's two kinds of batches, packed or not, and folders of pictures.

Every reader returns parts: pixels as bytes (rows, channels, height, width), and a class per row.
"""

import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.methods.base import require_count
from offbeat.zoo.data.files import checksum, damaged
from offbeat.zoo.data.images import hold_out
from offbeat.zoo.settings import require_part

Part = tuple[Tensor, Tensor]

_PACKING_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, KeyError)
_CIFAR_MD5 = {  # of the Python batches, as published
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}


def unpack(path: Path, member: str | None = None) -> bytes:
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


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    size = path.stat().st_size if path.is_file() else 0
    return damaged(path, f"{type(error).__name__}: {error} (the file has {size:,} bytes)")


def _part(pixels: NDArray[Any], labels: NDArray[Any], place: Path) -> Part:
    if labels.min(initial=0) < 0 or labels.max(initial=0) > 9:
        raise damaged(place, f"a label is {labels.max()}, the classes are 0 to 9")
    return torch.tensor(pixels), torch.tensor(labels, dtype=torch.int64)


def read_idx(images: Path, labels: Path) -> Part:
    """A part in LeCun's format, gzipped or not."""
    pixels, classes = _read_array(images, 3), _read_array(labels, 1)
    if len(pixels) != len(classes):
        raise damaged(labels, f"{len(classes)} labels for the {len(pixels)} images of {images}")
    return _part(pixels[:, None], classes, labels)


def _read_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    raw = unpack(path)
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


def read_cifar(path: Path) -> tuple[Part, Part]:
    """The training and the test part, of a folder or an archive of binary or Python batches."""
    found: dict[str, Part] = {}
    for name, raw in _members(path):
        place = path / name if path.is_dir() else path
        stem = name.removesuffix(".bin")
        found[stem] = (_read_pickled if stem == name else _read_binary)(raw, place)
        if stem == name and len(found[stem][1]) == 10_000:
            is_md5 = checksum(raw, "md5:")
            if is_md5 != _CIFAR_MD5[stem]:
                raise damaged(place, f"checksum {is_md5} of {stem} instead of {_CIFAR_MD5[stem]}")
    missing = [name for name in _CIFAR_MD5 if name not in found]
    if missing:
        raise damaged(path, f"{', '.join(missing)} not in it")
    *train, test = (found[name] for name in _CIFAR_MD5)
    pixels, labels = zip(*train, strict=True)
    return (torch.cat(pixels), torch.cat(labels)), test


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    wanted = {*_CIFAR_MD5, *(f"{stem}.bin" for stem in _CIFAR_MD5)}
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


def _read_binary(raw: bytes, place: Path) -> Part:
    row = 1 + 3 * 32 * 32
    if not raw or len(raw) % row:
        raise damaged(place, f"{len(raw):,} bytes instead of a multiple of {row:,} (30,730,000)")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, row)
    return _part(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], place)


def _read_pickled(raw: bytes, place: Path) -> Part:
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
    return _part(images, labels, place)


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


def read_folder(
    folder: Path, side: int, channels: int, test_share: float, seed: int
) -> tuple[Part, Part, tuple[str, ...]]:
    """The training part, the test part, and the names of the classes: a sub-folder is one."""
    require_count("side", side)
    if channels not in (1, 3):
        raise ConfigurationError(f"channels={channels!r}: give 3 for colour or 1 for grey.")
    tests = (folder / name for name in ("test", "val", "valid", "validation"))
    test_folder = next(filter(Path.is_dir, tests), None)
    if (folder / "train").is_dir() and test_folder is not None:
        classes = _class_names(folder / "train")
        train, test = _list_files(folder / "train", classes), _list_files(test_folder, classes)
    else:
        require_part("data 'images': test_share", test_share)
        classes = _class_names(folder)
        files = _list_files(folder, classes)
        if len(files) < 2:
            raise ConfigurationError(f"{folder} holds {len(files)} image: give at least two.")
        rows = hold_out(len(files), test_share, seed)
        train, test = ([files[row] for row in part.tolist()] for part in rows)
    return _read_files(train, side, channels), _read_files(test, side, channels), classes


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise ConfigurationError(f"data 'images': folder={str(folder)!r} is not a folder.")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not found:
        raise ConfigurationError(
            f"data 'images': {folder} has no sub-folders. It needs one per class, with PNG or JPEG"
            " files in it."
        )
    return tuple(found)


def _list_files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """The pictures of a part, each with the number of its class."""
    others = set(_class_names(folder)) - set(classes)
    if others:
        raise ConfigurationError(
            f"data 'images': {folder} has {', '.join(sorted(others))}, which train has not: both"
            " parts need the same classes."
        )
    found = [
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).glob("**/*"))
        if path.suffix.lower() in (".png", ".jpg", ".jpeg")
    ]
    if not found:
        raise ConfigurationError(f"data 'images': no PNG or JPEG file below {folder}.")
    return found


def _read_files(files: Sequence[tuple[Path, int]], side: int, channels: int) -> Part:
    pixels = torch.empty(len(files), channels, side, side, dtype=torch.uint8)
    for row, (path, _) in enumerate(files):
        pixels[row] = _read_picture(path, side, channels)
    return pixels, torch.tensor([number for _, number in files])


def _read_picture(path: Path, side: int, channels: int) -> Tensor:
    """The middle square, scaled."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtra(
            "data 'images' reads PNG and JPEG with Pillow, which is missing: pip install pillow"
        ) from error
    try:
        with Image.open(path) as image:
            plain = image.convert("RGB" if channels == 3 else "L")
            square = ImageOps.fit(plain, (side, side), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError) as error:
        raise damaged(path, f"{error} (the file has {path.stat().st_size:,} bytes)") from error
    return torch.from_numpy(np.array(square)).reshape(side, side, channels).permute(2, 0, 1)
