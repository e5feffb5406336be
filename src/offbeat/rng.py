"""Randomness that no process layout can change.

Dropout and its like draw from a state keyed by (seed, replica, stage, micro-batch). So a stage
draws the same numbers in one process and in many, a recomputation replays its forward, and the
caller's own generator is left where it was.

Python's and NumPy's global generators are set only for stages that draw from them: other threads of
a script may draw from them, too.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from ctypes import string_at
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, cast

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


class Habits(Protocol):
    """What is known of a stage."""

    draws: bool | None
    """Whether it draws from Python's or NumPy's generators; None while nobody knows."""


class Work(Protocol):
    """One forward of it."""

    drawn: "HostState | None"
    """What it drew from without a key."""


@contextmanager
def seeded(seed: int, device: torch.device, *, host: bool = False) -> Iterator[None]:
    """Seeds the generators a forward on ``device`` may draw from, and puts them back after.

    ``host``: Python's and NumPy's global ones, too.
    """
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    with _host_seeded(seed) if host else nullcontext():
        try:
            yield
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
        drawn.replay()
        yield


@contextmanager
def keyed(
    seed: int, device: torch.device, habits: Habits, work: Work, *, again: bool
) -> Iterator[None]:
    """Lets a forward draw numbers that depend on its seed alone.

    Python's and NumPy's generators are set once it is known to draw from them. If another thread is
    why it is taken for one that does, keys change nothing that it computes. ``again``: what it
    draws without a key has to be drawn once more later.
    """
    host = habits.draws is not False and work.drawn is None
    with seeded(seed, device, host=host), host_replayed(work.drawn):
        before = None if habits.draws else HostState.now(whole=again and not host)
        yield
        if before is None:
            return
        habits.draws = before.moved
        if habits.draws and before.whole is not None:
            work.drawn = before


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

    python: bytes
    gauss: float | None
    """The number that Python's generator has drawn ahead, if it has."""
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
        return cls(_python_state(), _PYTHON.gauss_next, numpy, answer)

    @property
    def moved(self) -> bool:
        """Whether somebody has drawn since."""
        return self[:3] != HostState.now()[:3]

    def replay(self) -> None:
        """Puts both generators back."""
        place, *words = np.frombuffer(self.python, np.uint32).tolist()
        random.setstate((_PYTHON.VERSION, (*words, place), self.gauss))
        np.random.set_state(self.whole)


_PYTHON: Any = cast(Any, random.getstate).__self__
"""Python's global generator."""


def _python_state() -> bytes:
    """Its place in the block of 624 numbers drawn ahead, and the block.

    It is asked around every forward, and ``getstate()`` makes 624 numbers of the block first, so it
    is read where it lies.
    """
    place = _place_of_block()
    if place is not None:
        return string_at(id(_PYTHON) + place, _NUMPY_BYTES)
    return _python_answer()


def _python_answer() -> bytes:
    _, (*words, place), _ = _PYTHON.getstate()
    return np.array([place, *words], np.uint32).tobytes()


@cache
def _place_of_block() -> int | None:
    """Where it lies in the object; None where that is not known."""
    if sys.implementation.name != "cpython":
        return None
    found = string_at(id(_PYTHON), type(_PYTHON).__basicsize__).find(_python_answer())
    return None if found < 0 else found


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
