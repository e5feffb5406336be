"""Randomness that no process layout can change.

Dropout and its like draw from a state keyed by (seed, replica, stage, micro-batch). So a stage
draws the same numbers in one process and in many, a recomputation replays its forward, and the
caller's own generator is left where it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def seed_for(seed: int, *, stage: int, micro_batch: int, replica: int = 0) -> int:
    """The seed of one forward pass; a reference loop with dropout can use the same."""
    key = f"{seed}/{replica}/{stage}/{micro_batch}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the generators a forward on ``device`` may draw from, and puts them back after."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
