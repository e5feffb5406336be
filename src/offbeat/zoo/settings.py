"""Settings of networks and data sets, checked against what their functions say they take."""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from offbeat.errors import ConfigurationError, unknown

_KINDS: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "true or false"),
    str: (str, "a word"),
    Path: (Path, "a path"),
    NoneType: (NoneType, "None"),
}


def plain_name(name: object) -> str:
    """A name by which networks and data sets are found: hyphens, underscores, spaces and capitals
    do not matter."""
    return re.sub(r"[-_ ]", "", str(name).lower())


def check_settings(
    what: str, build: Callable[..., Any], settings: Mapping[str, object], but: str = ""
) -> None:
    """Refuses names that a function does not take, and values of another type than annotated: text
    from a command line may be anything.

    Annotations that are not of the kinds below, as choices among words, are left to ``build``.
    ``but``: an argument that is no setting.
    """
    known = {name: p for name, p in signature(build).parameters.items() if name != but}
    for name in settings:
        if name not in known:
            raise unknown(f"setting of {what}:", name, known)
    needed = [n for n, p in known.items() if p.default is p.empty and n not in settings]
    if needed:
        raise ConfigurationError(
            f"{what} needs {' and '.join(needed)}: give them as settings, for example"
            f" {needed[0]}=256."
        )
    for name, value in settings.items():
        kind = known[name].annotation
        if not _fits(kind, value):
            raise ConfigurationError(f"{what}: {name}={value!r}: give {_wanted(kind, value)}.")


def _fits(kind: Any, value: object) -> bool:
    if get_origin(kind) is Sequence:
        (inner,) = get_args(kind)
        return isinstance(value, list | tuple) and all(_fits(inner, part) for part in value)
    options = _options(kind)
    if isinstance(value, bool):  # Python counts it among the numbers
        return not options or bool in options
    return not options or any(isinstance(value, _KINDS[option][0]) for option in options)


def _wanted(kind: Any, value: object) -> str:
    if get_origin(kind) is Sequence:
        return "whole numbers, as in (1,2)"
    options = _options(kind)
    if Path in options:
        return f"a path, as in './{value}'"  # a name of digits alone reads as a number
    return " or ".join(_KINDS[option][1] for option in options)


def _options(kind: Any) -> tuple[Any, ...]:
    """A known type, or those of a union of known types; none for anything else."""
    parts = get_args(kind) or (kind,)
    return parts if all(part in _KINDS for part in parts) else ()


def require_part(what: str, share: float) -> None:
    if not 0 < share < 1:
        raise ConfigurationError(f"{what}={share!r}: give a share between 0 and 1, as in 0.2.")
