"""Randomness that no process layout can change.

Dropout and its like draw from a state keyed by (seed, replica, stage, micro-batch). So a stage
draws the same numbers in one process and in many, a recomputation replays its forward, and the
caller's own generator is left where it was.

Python's and NumPy's global generators are set only for stages that draw from them: other threads of
a script may draw from them, too.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import string_at
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from offbeat.apart import Apart, others


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
def seeded(
    seed: int, device: torch.device, *, host: bool = False, lent: bool = False
) -> Iterator[Apart | None]:
    """Seeds what a forward on ``device`` may draw from, and puts it back after.

    ``host``: Python's and NumPy's global generators, too. ``lent``: PyTorch's own ones, even where
    other threads could draw from them meanwhile.
    """
    generators = _generators(device)
    if not lent and others():
        own = [torch.Generator(generator.device).manual_seed(seed) for generator in generators]
        with _host_seeded(seed) if host else nullcontext(), Apart(own) as apart:
            yield apart
        return
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    with _host_seeded(seed) if host else nullcontext():
        try:
            yield None
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def _host_seeded(seed: int) -> Iterator[None]:
    with _host_left_alone():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


@contextmanager
def host_replayed(drawn: "HostState | None") -> Iterator[None]:
    """Lets Python's and NumPy's generators draw once more what they drew from ``drawn`` on."""
    if drawn is None:
        yield
        return
    with _host_left_alone():
        random.setstate(drawn.python)
        np.random.set_state(drawn.whole)
        yield


@contextmanager
def _host_left_alone() -> Iterator[None]:
    """Lends NumPy a generator of the kind that seeds are for, whichever the caller has chosen."""
    numpy: Any = np.random  # whose stubs leave out how to exchange its generator
    python, state = random.getstate(), numpy.get_state(legacy=False)
    generator = numpy.get_bit_generator()
    numpy.set_bit_generator(_lent())
    try:
        yield
    finally:
        random.setstate(python)
        numpy.set_bit_generator(generator)
        numpy.set_state(state)


@cache
def _lent() -> Any:
    return np.random.MT19937()


class HostState(NamedTuple):
    """Where Python's and NumPy's global generators stand."""

    python: tuple[Any, ...]
    numpy: bytes
    whole: Any = None
    """NumPy's own answer, which takes 50 times as long."""

    @classmethod
    def now(cls, *, whole: bool = False) -> "HostState":
        """``whole``: so that it can be replayed."""
        generator = cast(Any, np.random).get_bit_generator()
        usual = isinstance(generator, np.random.MT19937)
        numpy = string_at((generator if usual else _lent()).ctypes.state_address, _NUMPY_BYTES)
        answer = np.random.get_state(legacy=False) if whole and usual else None
        return cls(random.getstate(), numpy, answer)

    @property
    def moved(self) -> bool:
        """Whether somebody has drawn since."""
        (_, then, gauss), ((_, now, other), numpy, _) = self.python, HostState.now()
        # The place in the block of numbers drawn ahead, and whether it is the same block.
        return (then[-1], then[0], gauss, self.numpy) != (now[-1], now[0], other, numpy)


_NUMPY_BYTES = 625 * 4
"""Of MT19937: a block of 624 numbers drawn ahead, and the place in it."""


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
