"""Text as token numbers, in windows of ``context`` tokens; the targets are one token further."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from offbeat.errors import ConfigurationError, unknown
from offbeat.rng import generator
from offbeat.zoo.data.bpe import BytePairs
from offbeat.zoo.data.loader import Batch

Unit = Literal["characters", "bytes", "words", "gpt2"]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over all tokens of all rows."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Tokens:
    """One part of a text. A row is a window; the tokens stay on their device in few bytes each."""

    def __init__(self, numbers: Tensor, context: int) -> None:
        if len(numbers) <= context:
            raise ConfigurationError(
                f"a part of the text has {len(numbers)} tokens, and a window of context={context}"
                " and its targets needs one more than that: give a smaller context, or more text."
            )
        self.numbers, self.context = numbers, context

    def __len__(self) -> int:
        """Windows that do not overlap."""
        return (len(self.numbers) - 1) // self.context

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.numbers.to(device), self.context)

    def count(self, size: int, *, train: bool, drop_last: bool) -> int:
        """Training windows lie anywhere, so every batch is full; an epoch reads as many tokens as
        the text has."""
        if train:
            return max(1, len(self) // size)
        return len(self) // size if drop_last else -(-len(self) // size)

    def batch(
        self, size: int, number: int, *, train: bool, augment: bool, seed: int, epoch: int
    ) -> Batch:
        del augment  # nothing to crop or flip
        if train:
            step = epoch * self.count(size, train=True, drop_last=False) + number
            last = len(self.numbers) - self.context
            starts = torch.randint(last, (size,), generator=generator("window", seed, step))
        else:
            rows = range(number * size, min((number + 1) * size, len(self)))
            starts = torch.tensor(rows) * self.context
        places = starts[:, None] + torch.arange(self.context + 1)
        windows = self.numbers[places.to(self.numbers.device)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How text becomes numbers and back."""

    size: int
    encode: Callable[[bytes], NDArray[Any]]
    decode: Callable[[Iterable[int]], str]


def encoding(unit: Unit, whole: bytes, gpt2: Callable[[], BytePairs]) -> Encoding:
    """The encoding of a text; characters and words are numbered by what occurs in it."""
    if unit == "bytes":
        return Encoding(
            size=256,
            encode=lambda raw: np.frombuffer(raw, np.uint8),
            decode=lambda numbers: bytes(int(n) for n in numbers).decode(errors="replace"),
        )
    if unit == "characters":
        return _characters(whole)
    if unit == "words":
        return _words(whole)
    if unit == "gpt2":
        pairs = gpt2()
        return Encoding(
            size=pairs.size,
            encode=lambda raw: np.array(pairs.encode(_decode(raw)), np.int32),
            decode=pairs.decode,
        )
    raise unknown("unit", unit, get_args(Unit))


def _characters(whole: bytes) -> Encoding:
    points = _code_points(whole)
    alphabet = np.flatnonzero(np.bincount(points))
    numbers = np.zeros(int(alphabet[-1]) + 1 if len(alphabet) else 1, np.int32)
    numbers[alphabet] = np.arange(len(alphabet))
    return Encoding(
        size=len(alphabet),
        encode=lambda raw: numbers[_code_points(raw)],
        decode=lambda found: "".join(chr(alphabet[int(n)]) for n in found),
    )


def _words(whole: bytes) -> Encoding:
    alphabet = list(dict.fromkeys(_split_words(whole)))
    numbers = {word: n for n, word in enumerate(alphabet)}
    return Encoding(
        size=len(alphabet),
        encode=lambda raw: np.array([numbers[word] for word in _split_words(raw)], np.int32),
        decode=lambda found: " ".join(alphabet[int(n)] for n in found),
    )


def _split_words(raw: bytes) -> list[str]:
    """Words between spaces, and ``<eos>`` at the end of every line."""
    lines = _decode(raw).removesuffix("\n").split("\n")
    return [word for line in lines for word in (*line.split(), "<eos>")]


def _code_points(raw: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(_decode(raw).encode("utf-32-le"), np.uint32)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"the text is not UTF-8 (byte {raw[error.start]:#04x} at place {error.start}): convert"
            ' it, or read it with unit="bytes".'
        ) from error
