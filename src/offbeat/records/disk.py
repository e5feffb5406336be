"""Files that are whole or not there: written aside, brought to disk, renamed.

A write that fails, or is killed, leaves what was there before. No link is followed: a file takes
the place of a link that has its name.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from offbeat.errors import StorageError

_DIGEST = "digest"
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def write(path: Path, content: str | Iterable[bytes | memoryview]) -> None:
    """Writes a file; a :class:`StorageError` says why it could not be."""
    with telling(path), writing(path) as file:
        for part in [content.encode()] if isinstance(content, str) else content:
            file.write(part)


@contextmanager
def writing(
    path: Path, opened: Callable[[Path], Any] = lambda aside: aside.open("xb")
) -> Iterator[Any]:
    """A file to be written, which has this path when the block has ended well.

    ``opened``: makes the file that is written to, which must be new.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder or a device", str(path))
    aside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        with opened(aside) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        settle(path.parent)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Says in a sentence what an error of the system means for this file."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {in_words(error)}. What was there before is as it was."
            " Make room or give another place, and write it again.",
            error.errno,
        ) from None


def in_words(error: OSError) -> str:
    """What went wrong, where the file is named elsewhere."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    if error.errno == errno.ELOOP:
        return "it is a link, and links in here are not followed"
    return error.strerror or str(error)


def read(path: Path) -> bytes:
    with reading(path) as file:
        content: bytes = file.read()
        return content


def reading(path: Path) -> BinaryIO:
    """A file to be read, which may be no link."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_LINK))


def sealed(value: dict[str, Any]) -> str:
    """JSON of a value with a digest of itself, which :func:`unsealed` compares."""
    return json.dumps({**value, _DIGEST: _digest(json.loads(json.dumps(value)))}, indent=1) + "\n"


def unsealed(content: str | bytes) -> tuple[dict[str, Any], bool]:
    """The value again, and whether it has a digest; a ValueError says that it is not as written."""
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError("it holds no names")
    digest = value.pop(_DIGEST, None)
    if digest not in (None, _digest(value)):
        raise ValueError("it has been changed or damaged (its digest differs)")
    return value, digest is not None


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def make_folder(path: Path) -> None:
    """A folder that may be there already; a link in its place is taken away."""
    if path.is_symlink():
        with suppress(FileNotFoundError):  # another process of this run was faster
            path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def remove(path: Path) -> None:
    """Deletes a folder with all in it, as far as possible; of a link nothing but itself."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def settle(folder: Path) -> None:
    """Waits until names, too, are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Growing:
    """A file that grows by whole lines: one that cannot be written is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK
        with telling(path):
            self._file = os.open(path, flags, 0o666)
        self.size = os.fstat(self._file).st_size

    def add(self, content: bytes) -> None:
        with telling(self.path):
            try:
                written = os.write(self._file, content)
                if written < len(content):
                    written += os.write(self._file, content[written:])  # says why it is no more
                if written < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self._file, self.size)
                raise
        self.size += len(content)

    def settle(self) -> None:
        """Waits until all is on the disk."""
        os.fsync(self._file)

    def cut(self, size: int) -> None:
        """Leaves the beginning alone."""
        os.ftruncate(self._file, size)
        self.size = size

    def close(self) -> None:
        os.close(self._file)
