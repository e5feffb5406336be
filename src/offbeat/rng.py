"""Randomness that no process layout can change.

Dropout and its like draw from a state keyed by (seed, replica, stage, micro-batch). So a stage
draws the same numbers in one process and in many, a recomputation replays its forward, and the
caller's own generator is left where it was.

Python's and NumPy's global generators are set only for stages that draw from them: other threads of
a script may draw from them, too. So they may from PyTorch's own: while there are other threads,
each operation of a stage that draws is handed a generator of the stage's (:class:`Apart`), and
nothing that others can see is touched. Where that cannot be (compiled code, activation checkpoints,
which note and replay the process's generator), it is lent as ever, and how far it has moved tells
whether somebody else has drawn, too.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import string_at
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
def seeded(
    seed: int, device: torch.device, *, host: bool = False, lent: bool = False
) -> Iterator["Apart | None"]:
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
        drawn.replay()
        yield


@contextmanager
def keyed(
    seed: int,
    device: torch.device,
    habits: Habits,
    work: Work,
    *,
    again: bool,
    lent: bool = False,
    watch: AbstractContextManager[None] | None = None,
) -> Iterator[None]:
    """Lets a forward draw numbers that depend on its seed alone.

    Python's and NumPy's generators are set once it is known to draw from them. If another thread is
    why it is taken for one that does, keys change nothing that it computes. ``again``: what it
    draws without a key has to be drawn once more later. ``lent``: as for :func:`seeded`. ``watch``:
    sees where generators stand before they are put back.
    """
    host = habits.draws is not False and work.drawn is None
    random = seeded(seed, device, host=host, lent=lent)
    with random, host_replayed(work.drawn), watch or nullcontext():
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


# ------------------------------------------------------------------------- beside other threads


_HARMLESS = ("offbeat-", "QueueFeederThread", "pin_memory", "IPythonHistorySavingThread")
"""Names of threads that never draw: this library's own, and those of loaders and notebooks."""
_HARMLESS_MODULES = ("rich.", "tqdm.", "tensorboard.", "torch.utils.data.")
"""Where classes of threads come from that never draw: progress bars and writers of events."""
_REPLAYING = torch.utils.checkpoint.__file__


def others() -> list[str]:
    """The other threads of the script, by name."""
    if threading.active_count() == 1:
        return []
    own = threading.current_thread()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not own and not _is_harmless(thread)
    ]


def _is_harmless(thread: threading.Thread) -> bool:
    known = type(thread).__module__.startswith(_HARMLESS_MODULES)
    return known or thread.name.startswith(_HARMLESS) or "pin_memory" in thread.name


class Apart(TorchDispatchMode):
    """Operations of this thread draw from these generators, wherever they would from the process's.

    A mode is of one thread: others draw as ever.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {generator.device.type: generator for generator in generators}
        self.replays = False
        """Whether an activation checkpoint has drawn, whose backward will draw again."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func):
            return func(*args, **kwargs)
        self.replays = self.replays or _is_replayed()
        own = self._own.get(_device_of(args, kwargs))
        taker, place = _taking(func)
        given = kwargs.get("generator") or (args[place] if place < len(args) else None)
        if own is None or (given is not None and not _is_process_own(given)):
            return func(*args, **kwargs)
        if taker is None:
            return _lend(own, lambda: func(*args, **kwargs))
        if place < len(args):
            return taker(*args[:place], own, *args[place + 1 :], **kwargs)
        return taker(*args, **{**kwargs, "generator": own})


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _taking(func: Any) -> tuple[Any, int]:
    """The form of an operation that takes a generator, and where; None if there is none."""
    space, operation, name = str(func).split(".")
    forms = ["generator"] if name == "default" else [f"{name}_generator"]
    forms += [name.replace("low", "low_generator")] if "low" in name else []
    for form in (name, *(form for form in forms if hasattr(func.overloadpacket, form))):
        overload = "" if form == "default" else form
        schema: Any = torch._C._get_schema(f"{space}::{operation}", overload)
        for place, argument in enumerate(schema.arguments):
            if argument.name == "generator":
                taker = getattr(func.overloadpacket, form)
                return taker, sys.maxsize if argument.kwarg_only else place
    return None, sys.maxsize


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    tensor = next((one for one in args if isinstance(one, Tensor)), None)
    if device is None and tensor is not None:
        device = tensor.device
    return torch.device(device or "cpu").type


def _is_process_own(generator: torch.Generator) -> bool:
    own = [torch.default_generator]
    own += torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    # Torch makes the Python object anew wherever it hands one over; what it stands for is the same.
    same: Any = torch.Generator._cdata  # type: ignore[attr-defined]
    return any(same.__get__(generator) == same.__get__(one) for one in own)


def _is_replayed() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _REPLAYING:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _default_for(own: torch.Generator) -> torch.Generator:
    if own.device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[own.device.index or 0]


def _lend(own: torch.Generator, operation: Callable[[], Any]) -> Any:
    """For an operation that takes no generator: until nobody else has drawn in the meantime."""
    default, begin = _default_for(own), own.get_state()
    ends: list[Tensor] = []
    while len(ends) < 2 or not torch.equal(ends[-1], ends[-2]):
        before = default.get_state()
        default.set_state(begin)
        result = operation()
        ends.append(default.get_state())
        default.set_state(before)
    own.set_state(ends[-1])
    return result


def offsets(*, host: bool, lent: bool) -> tuple[Any, ...]:
    """How far generators are in the block of numbers that each has drawn ahead.

    ``host``: Python's and NumPy's; ``lent``: PyTorch's.
    """
    found: list[Any] = []
    if host:
        numpy: Any = np.random.get_state(legacy=False)
        found += [random.getstate()[1][-1], numpy["state"]["pos"], numpy["has_gauss"]]
    if lent:
        found += torch.default_generator.get_state()[8:16].tolist()
    if lent and torch.cuda.is_initialized():
        found += [generator.get_offset() for generator in torch.cuda.default_generators]
    return tuple(found)
