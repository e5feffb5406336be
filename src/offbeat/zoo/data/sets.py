"""The data sets: what training needs to know of one, and each found by its files."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.base import require_count
from offbeat.zoo.data import resources
from offbeat.zoo.data.bpe import BytePairs, read_merges
from offbeat.zoo.data.digits import raw_digits
from offbeat.zoo.data.files import checksum, damaged, find
from offbeat.zoo.data.formats import Part, read_cifar, read_folder, read_idx, unpack
from offbeat.zoo.data.images import Augmentation, Images, Scale, scale_of
from offbeat.zoo.data.loader import Loader, Source
from offbeat.zoo.data.text import Tokens, Unit, encoding, token_loss
from offbeat.zoo.settings import check_settings, plain_name, require_part

Folder = str | Path | None


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set in memory: its parts, the shape of a row, and the loss that goes with it.

    ``classes`` is set for images, ``vocabulary`` for text; the other one is None.
    """

    name: str
    train: Source
    test: Source
    validation: Source | None = None
    """A third part, where the data set is published with one."""
    shape: tuple[int, ...]
    """Of one row of x: (channels, side, side), or (context,)."""
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int | None = None
    vocabulary: int | None = None
    names: tuple[str, ...] = ()
    """Of the classes."""
    decode: Callable[[Any], str] | None = None
    """Text from token numbers."""

    def loader(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        augment: bool = True,
        drop_last: bool = False,
    ) -> Loader:
        """Training batches, shuffled and augmented by (seed, epoch, batch) alone."""
        return Loader(
            self.train.to(device), batch_size, seed=seed, augment=augment, drop_last=drop_last
        )

    def test_loader(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        part: Literal["train", "validation", "test"] = "test",
    ) -> Loader:
        """All rows of a part in their order, as they are."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        source = parts.get(part)
        if source is None:
            known = ", ".join(name for name, there in parts.items() if there is not None)
            raise ConfigurationError(f"data {self.name!r} has no part {part!r}. It has: {known}.")
        return Loader(source.to(device), batch_size, train=False, augment=False)

    @property
    def settings(self) -> dict[str, Any]:
        """What a network must fit, under the names of the networks' settings."""
        if self.vocabulary is not None:
            return {"vocabulary": self.vocabulary, "context": self.shape[0]}
        channels, side, width = self.shape
        inputs = channels * side * width
        return {"classes": self.classes, "channels": channels, "side": side, "inputs": inputs}


def digits_data(folder: Folder = None, *, seed: int = 0, test_share: float = 0.2) -> Data:
    """scikit-learn's 8x8 digits, split as ``digits(seed, test_share)`` does."""
    del folder  # they come with scikit-learn
    train, y_train, test, y_test = raw_digits(seed, test_share)
    return _images(
        "digits",
        (train.to(torch.uint8), y_train),
        (test.to(torch.uint8), y_test),
        Scale(train.mean(), train.std()),
        tuple("0123456789"),
    )


def mnist(folder: Folder = None, *, download: bool = True) -> Data:
    """60,000 + 10,000 handwritten digits of 28x28."""
    files, scale = resources.MNIST, (0.13066, 0.30811)
    return _idx("mnist", files, "MNIST/raw", folder, download, scale, tuple("0123456789"))


def fashion_mnist(folder: Folder = None, *, download: bool = True) -> Data:
    """60,000 + 10,000 pieces of clothing of 28x28, in MNIST's format."""
    files, scale, names = resources.FASHION_MNIST, (0.28604, 0.35302), resources.FASHION_CLASSES
    return _idx("fashion-mnist", files, "FashionMNIST/raw", folder, download, scale, names)


def cifar10(folder: Folder = None, *, download: bool = True) -> Data:
    """50,000 + 10,000 colour images of 32x32; augmented by crops with a border of 4 and mirrors."""
    path = find("cifar10", resources.CIFAR_10, folder, download=download)
    if path.is_file() and path.name in resources.CIFAR_FIRST_BATCHES:
        path = path.parent
    scale = Scale(
        255 * torch.tensor([0.49140, 0.48216, 0.44653]),
        255 * torch.tensor([0.24703, 0.24349, 0.26159]),
    )
    augmentation = Augmentation(pad=4, flip=True)
    return _images("cifar10", *read_cifar(path), scale, resources.CIFAR_CLASSES, augmentation)


def image_folder(
    folder: Folder,
    *,
    side: int = 32,
    channels: int = 3,
    test_share: float = 0.2,
    seed: int = 0,
    pad: int | None = None,
    flip: bool = True,
) -> Data:
    """PNG and JPEG files, one sub-folder per class, scaled and cut to ``side`` x ``side``.

    The classes lie in ``train/`` and ``test/`` (or ``val/``); without these two a share is held out
    by ``seed``. ``pad``: the border for random crops, an eighth of the side unless given.
    """
    if folder is None:
        raise ConfigurationError(
            "data 'images' needs folder=...: one that holds a sub-folder of images per class."
        )
    if pad is not None and pad < 0:
        raise ConfigurationError(f"data 'images': pad={pad}: give a border of 0 pixels or more.")
    train, test, classes = read_folder(Path(folder), side, channels, test_share, seed)
    augmentation = Augmentation(pad=side // 8 if pad is None else pad, flip=flip)
    return _images("images", train, test, scale_of(train[0]), classes, augmentation)


def text(
    folder: Folder = None,
    *,
    file: str | Path | None = None,
    unit: Unit = "characters",
    context: int = 128,
    test_share: float = 0.1,
    download: bool = True,
) -> Data:
    """Any text file; its end is held out. ``folder`` may be the file, or hold GPT-2's merges."""
    path = Path(file or folder or "")
    if not path.is_file():
        raise ConfigurationError(
            f"data 'text': file={str(path)!r} is not a file. Give the path of a text file."
        )
    require_part("data 'text': test_share", test_share)
    whole = unpack(path)
    places = [int(len(whole) * (1 - test_share))]
    merges = None if folder is None or Path(folder).is_file() else folder
    return _text(path.stem, _cut(whole, places, unit), unit, context, merges, download)


def tinyshakespeare(
    folder: Folder = None, *, unit: Unit = "characters", context: int = 256, download: bool = True
) -> Data:
    """1,115,394 characters of Shakespeare's plays; the last tenth is held out."""
    path = find("tinyshakespeare", resources.TINY_SHAKESPEARE, folder, download=download)
    whole = unpack(path)
    parts = _cut(whole, [int(len(whole) * 0.9)], unit)
    return _text("tinyshakespeare", parts, unit, context, folder, download)


def enwik8(
    folder: Folder = None, *, unit: Unit = "bytes", context: int = 512, download: bool = True
) -> Data:
    """The first 10^8 bytes of a Wikipedia: 90 million to train, 5 to validate, 5 to test."""
    path = find("enwik8", resources.ENWIK8, folder, download=download)
    whole = unpack(path)
    size, wanted = resources.ENWIK8_UNPACKED
    if len(whole) != size:
        raise damaged(path, f"{len(whole):,} bytes unpacked instead of {size:,}")
    found = checksum(whole, wanted)
    if found != wanted:
        raise damaged(path, f"checksum {found} of its contents instead of {wanted}")
    parts = _cut(whole, [size * 90 // 100, size * 95 // 100], unit)
    return _text("enwik8", parts, unit, context, folder, download)


def wikitext2(
    folder: Folder = None, *, unit: Unit = "words", context: int = 128, download: bool = True
) -> Data:
    """WikiText-2, the version with ``<unk>``: two million words, and parts to validate and test."""
    path = find("wikitext-2", resources.WIKITEXT_2, folder, download=download)
    names = [f"wiki.{part}.tokens" for part in ("train", "valid", "test")]
    if path.suffix == ".zip":
        parts = [unpack(path, member=f"wikitext-2/{name}") for name in names]
    else:
        parts = [_bytes_of(path.parent / name) for name in names]
    return _text("wikitext-2", parts, unit, context, folder, download)


def gpt2_tokens(folder: Folder = None, *, download: bool = True) -> BytePairs:
    """GPT-2's encoder, from its list of merges."""
    inside = ["../gpt2-bpe"]
    path = find("gpt2-bpe", resources.GPT_2_MERGES, folder, inside=inside, download=download)
    return read_merges(path)


DATA: dict[str, Callable[..., Data]] = {
    "digits": digits_data,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "images": image_folder,
    "text": text,
    "tinyshakespeare": tinyshakespeare,
    "enwik8": enwik8,
    "wikitext-2": wikitext2,
}


def data_named(name: str, /, folder: Folder = None, **settings: Any) -> Data:
    """A data set by name; hyphens, underscores, spaces and capitals do not matter.

    It is looked for in ``folder``, then in the cache ($OFFBEAT_DATA, otherwise ~/.cache/offbeat),
    and downloaded last. ``settings`` are the arguments of its function.

    >>> data_named("digits").shape
    (1, 8, 8)
    """
    plain = {plain_name(known): build for known, build in DATA.items()}
    build = plain.get(plain_name(name))
    if build is None:
        raise unknown("data", name, DATA)
    check_settings(f"data {name}", build, settings, but="folder")
    return build(folder, **settings)


def _idx(
    name: str,
    files: Sequence[resources.Resource],
    inside: str,
    folder: Folder,
    download: bool,
    scale: tuple[float, float],
    names: tuple[str, ...],
) -> Data:
    paths = [find(name, file, folder, inside=[inside], download=download) for file in files]
    train, test = read_idx(*paths[:2]), read_idx(*paths[2:])
    return _images(name, train, test, Scale(*(torch.tensor(255 * n) for n in scale)), names)


def _images(
    name: str,
    train: Part,
    test: Part,
    scale: Scale,
    names: tuple[str, ...],
    augmentation: Augmentation | None = None,
) -> Data:
    _, channels, height, width = train[0].shape
    return Data(
        name=name,
        train=Images(*train, scale, augmentation),
        test=Images(*test, scale),
        shape=(channels, height, width),
        loss=F.cross_entropy,
        classes=len(names),
        names=names,
    )


def _text(
    name: str, parts: Sequence[bytes], unit: Unit, context: int, folder: Folder, download: bool
) -> Data:
    """Parts are train and test, or train, validation and test."""
    # A part may end without a line end, and its last word is not the beginning of the next.
    whole = (b"\n" if unit == "words" else b"").join(parts)
    chosen = encoding(unit, whole, partial(gpt2_tokens, folder, download=download))
    require_count("context", context)
    kind = np.uint8 if chosen.size <= 256 else np.int32  # the smallest that holds every token
    numbers = (torch.from_numpy(chosen.encode(part).astype(kind)) for part in parts)
    sources = [Tokens(each, context) for each in numbers]
    return Data(
        name=name,
        train=sources[0],
        test=sources[-1],
        validation=sources[1] if len(sources) == 3 else None,
        shape=(context,),
        loss=token_loss,
        vocabulary=chosen.size,
        decode=chosen.decode,
    )


def _cut(whole: bytes, places: Sequence[int], unit: Unit) -> list[bytes]:
    """Contiguous parts; no word is cut in two where words are the unit, and no character of several
    bytes unless bytes are."""
    moved = []
    for place in places:
        while unit != "bytes" and place < len(whole) and whole[place] & 0xC0 == 0x80:
            place += 1
        moved.append(_after_word(whole, place) if unit == "words" else place)
    return [whole[start:end] for start, end in pairwise([0, *moved, len(whole)])]


def _after_word(whole: bytes, place: int) -> int:
    """The place itself between two words; otherwise behind the word and the space after it.

    A line end stays with its line, for a part that began with one would begin with a line of no
    words.
    """
    before = whole[max(0, place - 4) : place].decode(errors="ignore")  # a character or more
    if before[-1:].isspace():
        return place
    # Bytes that are no text are refused later, in words.
    rest = whole[place:].decode(errors="surrogateescape")
    space = re.search(r"\s", rest)
    skipped = rest if space is None else rest[: space.end()]
    return place + len(skipped.encode(errors="surrogateescape"))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
