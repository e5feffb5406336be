"""GPT-2's byte-level byte-pair encoding, from its list of merges alone.

Text is cut into pieces (a word with the space before it, digits, signs, white space). A piece
starts as bytes; the adjacent pair that stands first in the list is merged until none is left. Token
numbers follow from the list: 256 bytes, then one token per merge, then ``<|endoftext|>``.

Reference: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from unicodedata import category

from offbeat.zoo.data.files import damaged

Pair = tuple[int, int]

# Unicode's White_Space. Python's \s would add the separators 1c to 1f, which GPT-2's does not.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class BytePairs:
    """The encoder and decoder. ``<|endoftext|>`` in a text is plain text."""

    def __init__(self, merges: Iterable[tuple[str, str]]) -> None:
        """``merges`` as they are printed in the file: one visible character per byte."""
        letters = _printed_bytes()
        tokens = [bytes([byte]) for byte in letters.values()]
        number = {letter: n for n, letter in enumerate(letters)}
        self._bytes = {byte: n for n, byte in enumerate(letters.values())}
        self._merged: dict[Pair, int] = {}
        for left, right in merges:
            pair = number[left], number[right]
            self._merged[pair] = number[left + right] = len(tokens)
            tokens.append(tokens[pair[0]] + tokens[pair[1]])
        self.size = len(tokens) + 1
        self._tokens = [*tokens, b"<|endoftext|>"]
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        known, numbers = self._known, []
        for piece in _pattern(text).findall(text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self._merge(piece)
            numbers += found
        return numbers

    def decode(self, numbers: Iterable[int]) -> str:
        return b"".join(self._tokens[int(n)] for n in numbers).decode(errors="replace")

    def _merge(self, piece: str) -> list[int]:
        parts = [self._bytes[byte] for byte in piece.encode()]
        while len(parts) > 1:
            # Later merges have greater numbers, so the first in the list is the smallest.
            found = [self._merged.get(pair) for pair in pairwise(parts)]
            first = min((n for n in found if n is not None), default=None)
            if first is None:
                break
            merged, place = [], 0
            while place < len(parts):
                whole = place < len(found) and found[place] == first
                merged.append(first if whole else parts[place])
                place += 2 if whole else 1
            parts = merged
        return parts


def read_merges(path: Path) -> BytePairs:
    """From ``merges.txt`` (OpenAI's name: ``vocab.bpe``): a version line, then two parts a line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    lines = [line for line in lines if line and not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    try:
        return BytePairs(pairs)
    except KeyError as error:
        raise damaged(path, f"it merges {error} before that is a token") from error


def _pattern(text: str) -> re.Pattern[str]:
    r"""GPT-2's pattern. Python has no \p{L} and \p{N}: spelt for the characters at hand."""
    others = sorted(character for character in set(text) if not character.isascii())
    letter = "a-zA-Z" + "".join(c for c in others if category(c)[0] == "L")
    digit = "0-9" + "".join(c for c in others if category(c)[0] == "N")
    return re.compile(
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{digit}]+| ?[^{_SPACE}{letter}{digit}]+"
        f"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )


def _printed_bytes() -> dict[str, int]:
    """The visible character that stands for each byte, in the order of their token numbers."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    pairs = [(chr(byte), byte) for byte in visible]
    return dict(pairs + [(chr(256 + n), byte) for n, byte in enumerate(hidden)])
