"""Randomness that no process layout can change.

Dropout and its like draw from a state keyed by (seed, replica, stage, micro-batch). So a stage
draws the same numbers in one process and in many, a recomputation replays its forward, and the
caller's own generator is left where it was.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch


def seed_for(seed: int, *, stage: int, micro_batch: int, replica: int = 0) -> int:
    """The seed of one forward pass; a reference loop with dropout can use the same."""
    return _seed_of(seed, replica, stage, micro_batch)


def generator(*key: object) -> torch.Generator:
    """A generator of its own per key: the caller's global state stays where it is."""
    return torch.Generator().manual_seed(_seed_of(*key))


def _seed_of(*key: object) -> int:
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the generators a forward on ``device`` may draw from, and puts them back after."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


def generator_states(device: torch.device) -> dict[str, Any]:
    """The caller's own generators: PyTorch's, Python's and NumPy's global ones."""
    name, numbers, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {
        "torch": [generator.get_state() for generator in _generators(device)],
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(numbers.astype(np.int64)), *rest],
    }


def set_generators(states: dict[str, Any], device: torch.device) -> None:
    """Puts back what :func:`generator_states` gave."""
    for generator, state in zip(_generators(device), states["torch"], strict=True):
        generator.set_state(state)
    random.setstate(states["python"])
    name, numbers, *rest = states["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
