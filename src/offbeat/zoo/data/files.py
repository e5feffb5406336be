"""Finding a file: in the user's folder, in the cache, or on the net.

A download is written aside, checked and renamed, so the cache never holds half a file. Published
sizes and checksums are demanded of every file that bears the published name, wherever it lies. Only
where copies that someone packed again are common (``repacked``) is another size taken.
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from shutil import copyfileobj
from typing import IO
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import wrap_file

from offbeat.errors import ConfigurationError
from offbeat.records import disk
from offbeat.zoo.data.resources import Resource

_SILENCE_S = 30.0


def find(
    dataset: str,
    resource: Resource,
    folder: str | Path | None = None,
    *,
    inside: Iterable[str] = (),
    download: bool = True,
) -> Path:
    """The path of a resource, after a download if need be.

    ``inside``: folders within ``folder`` in which it may lie, besides ``folder`` and
    ``folder/dataset``.
    """
    cached = cache() / dataset
    places = [*_places(dataset, folder, inside), cached]
    for place in places:
        for name in (resource.name, *resource.also):
            path = place / name
            if path.is_dir() if name.endswith("/") else path.is_file():
                _check(path, resource)
                return path
    target = cached / resource.name
    failures = _download(resource, target) if download else ["download=False"]
    if failures is None:
        return target
    looked = " or ".join(map(str, places))
    raise ConfigurationError(
        f"data {dataset!r}: {resource.name} is not in {looked}, and could not be downloaded"
        f" ({'; '.join(failures)}). Put the file into one of these folders, or name the folder that"
        " has it: folder=... (--data-folder; or set OFFBEAT_DATA)."
    )


def cache() -> Path:
    """Where downloads are kept: $OFFBEAT_DATA, otherwise ~/.cache/offbeat."""
    given = os.environ.get("OFFBEAT_DATA")
    return Path(given) if given else Path.home() / ".cache" / "offbeat"


def damaged(path: Path, what: str) -> ConfigurationError:
    """The error for a file that is not what it should be."""
    return ConfigurationError(
        f"{path} is damaged: {what}. Delete it, or replace it by a whole one."
    )


def _places(dataset: str, folder: str | Path | None, inside: Iterable[str]) -> list[Path]:
    if folder is None:
        return []
    if not Path(folder).is_dir():
        raise ConfigurationError(
            f"data {dataset!r}: folder={str(folder)!r} is not a folder. Name the one that holds the"
            " files, or leave it out to use the cache and the net."
        )
    # The folder itself comes last: a file of a common name there may be something else.
    return [Path(folder) / name for name in (dataset, *inside, "")]


def _check(path: Path, resource: Resource) -> None:
    same_size = path.stat().st_size == resource.size
    if path.name == resource.name and (same_size or not resource.repacked):
        try:
            _compare(path, resource)
        except ValueError as error:
            raise damaged(path, str(error)) from error


def checksum(source: Path | bytes, wanted: str) -> str:
    """The checksum of a file or of bytes, of the kind ``wanted`` has."""
    if not wanted:
        return ""
    kind = wanted.partition(":")[0]
    if isinstance(source, bytes):
        return f"{kind}:{hashlib.new(kind, source).hexdigest()}"
    with source.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _download(resource: Resource, target: Path) -> list[str] | None:
    """None after a success, otherwise why each mirror failed."""
    failures = []
    for url in resource.urls:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with disk.writing(target) as file:
                _fetch(url, resource, file)
                file.flush()
                _compare(Path(file.name), resource)
            return None
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{url}: {str(error) or type(error).__name__}")
    return failures


def _fetch(url: str, resource: Resource, file: IO[bytes]) -> None:
    request = Request(url, headers={"User-Agent": "offbeat"})
    with urlopen(request, timeout=_SILENCE_S) as response:
        promised = int(response.headers.get("Content-Length") or resource.size or 0)
        words = f"downloading {resource.name} ({promised / 1e6:.1f} MB)"
        if sys.stderr.isatty():
            screen = Console(stderr=True)
            response = wrap_file(response, total=promised, description=words, console=screen)
        else:
            print(words, file=sys.stderr)
        with response as source:
            copyfileobj(source, file)
    if promised and file.tell() != promised:  # a broken connection just ends the stream
        raise ValueError(f"the connection ended after {file.tell():,} of {promised:,} bytes")


def _compare(path: Path, resource: Resource) -> None:
    size = path.stat().st_size
    if resource.size not in (None, size):
        raise ValueError(f"{size:,} bytes instead of {resource.size:,}")
    found = checksum(path, resource.checksum)
    if found != resource.checksum:
        raise ValueError(f"checksum {found} instead of {resource.checksum}")
