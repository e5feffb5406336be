"""Randomness by key: any order or window can be drawn again without those before it."""

from hashlib import blake2b

import torch


def generator(*key: object) -> torch.Generator:
    """A generator of its own per key: the caller's global state stays where it is."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
