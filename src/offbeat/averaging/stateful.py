"""What outer rules and codecs know from one average to the next, and how checkpoints hold it."""

from dataclasses import is_dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch

from offbeat import nest
from offbeat.errors import ConfigurationError


class Stateful:
    """States in ``remembers`` which of its attributes change; all others are settings.

    What it remembers are tensors, numbers, strings and None, also in lists, tuples and dicts. Its
    tensors are replaced and never written to, because a checkpoint may still be reading them.
    Settings are plain values that are given once. Anything else is refused at its assignment: a
    checkpoint would lose it, and a resumed run would train on to other bits.
    """

    remembers: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        what = f"{type(self).__name__}.{name}"
        if name in self.remembers:
            if (stranger := nest.stranger(value)) is not None:
                raise ConfigurationError(
                    f"{what} remembers a {type(stranger).__name__}, which no checkpoint can hold."
                    " Keep tensors, numbers, strings and None, or lists, tuples and dicts of them."
                )
        elif not _is_setting(value):
            raise ConfigurationError(
                f"{what} is a {type(value).__name__}, which may change, and a checkpoint would lose"
                f" it. Add {name!r} to `remembers`, or give a setting as a number, string or tuple."
            )
        elif name in vars(self):
            raise ConfigurationError(
                f"{what} changes from {vars(self)[name]!r} to {value!r}, and a checkpoint would"
                f" lose it. Add {name!r} to `remembers`."
            )
        super().__setattr__(name, value)

    def memory(self) -> dict[str, Any]:
        """All it remembers, in containers of their own."""
        return {
            name: nest.replace(vars(self)[name], lambda tensor: tensor)
            for name in self.remembers
            if name in vars(self)
        }

    def load(self, memory: dict[str, Any]) -> None:
        for name, value in memory.items():
            setattr(self, name, nest.replace(value, lambda tensor: tensor))


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    if is_dataclass(type(value)):
        return bool(type(value).__dataclass_params__.frozen)  # type: ignore[attr-defined]
    plain = bool | int | float | str | torch.dtype | torch.device | FunctionType
    return value is None or isinstance(value, plain)
