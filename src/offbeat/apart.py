"""Random numbers of a forward while other threads of the script live.

Layers draw from the process's own generators, which every thread sees: to lend these to a forward,
seeded, would give another thread's draws to the stage, and the stage's to the other thread. So
while there are other threads, each operation that draws is handed a generator of the stage's own,
and nothing that others can see is touched. Where that cannot be (compiled code, activation
checkpoints, which note and replay the process's generator), it is lent as ever, and how far it has
moved tells whether somebody else has drawn, too.
"""

import random
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_HARMLESS = ("offbeat-", "QueueFeederThread", "pin_memory", "tqdm", "IPythonHistorySavingThread")
"""Names of threads that never draw: this library's own, and those of loaders and progress bars."""
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
    kind = type(thread).__name__
    return thread.name.startswith(_HARMLESS) or "pin_memory" in thread.name or kind == "TMonitor"


class Apart(TorchDispatchMode):
    """Operations of this thread draw from these generators, wherever they would from the process's.

    A mode is of one thread: others draw as ever.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
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
    packet, name = func.overloadpacket, func._overloadname
    forms = ["generator"] if name == "default" else [f"{name}_generator"]
    forms += [name.replace("low", "low_generator")] if "low" in name else []
    for form in (name, *forms):
        found = getattr(packet, form, None)
        arguments = [] if found is None else found._schema.arguments
        for place, argument in enumerate(arguments):
            if argument.name == "generator":
                return found, sys.maxsize if argument.kwarg_only else place
    return None, sys.maxsize


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    tensor = next((one for one in args if isinstance(one, Tensor)), None)
    if device is None and tensor is not None:
        device = tensor.device
    return torch.device(device or "cpu").type


def _is_process_own(generator: torch.Generator) -> bool:
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return generator is torch.default_generator or any(generator is one for one in cuda)


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
