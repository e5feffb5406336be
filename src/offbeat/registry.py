"""Things chosen by name and settings: methods, averagings, corrections."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol, TypeVar

from offbeat.errors import ConfigurationError, unknown


class Named(Protocol):
    name: ClassVar[str]


Kind = TypeVar("Kind", bound=Named)


def made(
    what: str,
    kinds: Sequence[type[Kind]],
    name: str,
    settings: dict[str, Any],
    also: Sequence[str] = (),
) -> Kind:
    """The one of these dataclasses that has this name, case ignored, with these settings.

    ``also``: names that are understood elsewhere, for the list of those that are known.
    """
    kind = kind_named(kinds, name)
    if kind is None:
        _explain(what, kinds, name)
        raise unknown(what, name, [*(kind.name for kind in kinds), *also])
    _check(kind, settings)
    return kind(**settings)


def _explain(what: str, kinds: Sequence[type[Named]], name: str) -> None:
    """Answers what the command line writes in one text, and Python in arguments."""
    first, colon, settings = name.partition(":")
    if colon and (kind := kind_named(kinds, first)) is not None:
        raise ConfigurationError(
            f"{what} {name!r}: settings behind a colon are for the command line. Here they are"
            f" arguments: {kind.__name__}({settings.strip()})."
        )
    several = [part.strip() for part in name.replace("+", ",").split(",")]
    if len(several) > 1 and all(kind_named(kinds, part) for part in several):
        raise ConfigurationError(f"{what} {name!r} names {len(several)}: give each by itself.")


def kind_named(kinds: Sequence[type[Kind]], name: str) -> type[Kind] | None:
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    return next((kind for kind in kinds if wanted in (kind.name, kind.__name__.lower())), None)


def _check(kind: Any, settings: dict[str, Any]) -> None:
    known = {f.name: f for f in fields(kind)}
    for setting in settings:
        if setting not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no settings"
            raise ConfigurationError(f"{kind.name} has no setting {setting!r}: {takes}.")
    needed = [n for n, f in known.items() if f.default is f.default_factory is MISSING]
    missing = [n for n in needed if n not in settings]
    if missing:
        example = ", ".join(f"{n}=..." for n in needed)
        raise ConfigurationError(
            f"{kind.name} needs {' and '.join(missing)}: give {kind.__name__}({example})."
        )
