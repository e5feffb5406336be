"""A folder of images, one sub-folder per class, read through Pillow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.methods.base import require_count
from offbeat.zoo.data.finding import damaged
from offbeat.zoo.data.keys import generator
from offbeat.zoo.settings import require_part

_ENDINGS = {".png", ".jpg", ".jpeg"}
_TEST_FOLDERS = ("test", "val", "valid", "validation")

Labelled = tuple[Path, int]


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Pixels as bytes and class numbers, of the training part and of the test part."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]


def read_folder(
    folder: Path, side: int, channels: int, test_share: float, seed: int
) -> ImageFolder:
    require_count("side", side)
    if channels not in (1, 3):
        raise ConfigurationError(f"channels={channels!r}: give 3 for colour or 1 for grey.")
    train, test, classes = _split(folder, test_share, seed)
    return ImageFolder(
        train=_read(train, side, channels), test=_read(test, side, channels), classes=classes
    )


def _split(
    folder: Path, share: float, seed: int
) -> tuple[list[Labelled], list[Labelled], tuple[str, ...]]:
    held_out = next((folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and held_out is not None:
        classes = _classes(folder / "train")
        return _files(folder / "train", classes), _files(held_out, classes), classes
    require_part("data 'images': test_share", share)
    classes = _classes(folder)
    files = _files(folder, classes)
    if len(files) < 2:
        raise ConfigurationError(f"{folder} holds {len(files)} image: give at least two.")
    order = torch.randperm(len(files), generator=generator("split", seed)).tolist()
    count = min(len(files) - 1, max(1, round(len(files) * share)))
    chosen = [files[n] for n in order]
    return chosen[count:], chosen[:count], classes


def _classes(folder: Path) -> tuple[str, ...]:
    found = (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if _there(folder) else []
    )
    if not found:
        raise ConfigurationError(
            f"data 'images': {folder} has no sub-folders. It needs one per class, with PNG or JPEG"
            " files in it."
        )
    return tuple(found)


def _there(folder: Path) -> bool:
    if folder.is_dir():
        return True
    raise ConfigurationError(f"data 'images': folder={str(folder)!r} is not a folder.")


def _files(folder: Path, classes: Sequence[str]) -> list[Labelled]:
    others = set(_classes(folder)) - set(classes)
    if others:
        raise ConfigurationError(
            f"data 'images': {folder} has {', '.join(sorted(others))}, which train has not: both"
            " parts need the same classes."
        )
    found = [
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).glob("**/*"))
        if path.suffix.lower() in _ENDINGS
    ]
    if not found:
        raise ConfigurationError(f"data 'images': no PNG or JPEG file below {folder}.")
    return found


def _read(files: Sequence[Labelled], side: int, channels: int) -> tuple[Tensor, Tensor]:
    pixels = torch.empty(len(files), channels, side, side, dtype=torch.uint8)
    for row, (path, _) in enumerate(files):
        pixels[row] = _pixels(path, side, channels)
    return pixels, torch.tensor([number for _, number in files])


def _pixels(path: Path, side: int, channels: int) -> Tensor:
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
