"""Things chosen by name and settings, as in ``adl:accumulate=4``: methods, corrections, averagings.

Here alone such a text is read and written, and here alone settings are held against the fields of
the dataclass that takes them.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from offbeat.errors import ConfigurationError, unknown


class Named(Protocol):
    """A frozen dataclass of settings with a name: a method, a correction or an averaging."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]


Kind = TypeVar("Kind", bound=Named)


def choose(
    what: str,
    kinds: Sequence[type[Kind]],
    name: str,
    settings: dict[str, Any],
    also: Sequence[str] = (),
) -> Kind:
    """The one of these dataclasses that has this name, case ignored, with these settings.

    ``also``: names that are understood elsewhere, for the list of those that are known.
    """
    kind = find_kind(kinds, name)
    if kind is None:
        _explain(what, kinds, name)
        raise unknown(what, name, [*(kind.name for kind in kinds), *also])
    _check(kind, settings)
    return kind(**settings)


def _explain(what: str, kinds: Sequence[type[Named]], name: str) -> None:
    """Answers what the command line writes in one text, and Python in arguments."""
    first, colon, settings = name.partition(":")
    if colon and (kind := find_kind(kinds, first)) is not None:
        raise ConfigurationError(
            f"{what} {name!r}: settings behind a colon are for the command line. Here they are"
            f" arguments: {kind.__name__}({settings.strip()})."
        )
    several = [part.strip() for part in name.replace("+", ",").split(",")]
    if len(several) > 1 and all(find_kind(kinds, part) for part in several):
        raise ConfigurationError(f"{what} {name!r} names {len(several)}: give each by itself.")


def find_kind(kinds: Sequence[type[Kind]], name: str) -> type[Kind] | None:
    """The one of this name, in whatever case and with whatever between its words."""
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


@dataclass(frozen=True)
class Choice:
    """A name and its settings: ``adl:accumulate=4``, or a table with ``name`` in a TOML file."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Named) -> "Choice":
        """Its name, with the settings in which it differs from its defaults."""
        values = {f.name: (getattr(named, f.name), f.default) for f in fields(named)}
        return cls(named.name, {k: value for k, (value, usual) in values.items() if value != usual})

    @classmethod
    def read(cls, value: Any, what: str) -> "Choice":
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            if not isinstance(value.get("name"), str):
                raise ConfigurationError(f'{what}: a table needs a name, as in name = "adl".')
            stored = set(value) == {"name", "settings"}  # as a run keeps it
            table = value["settings"] if stored else {k: value[k] for k in value if k != "name"}
            return cls(value["name"], dict(table))
        name, _, rest = str(value).partition(":")
        settings: dict[str, Any] = {}
        for part in _with_tuples(_split_settings(rest)):
            key, equals, text = part.partition("=")
            if not equals or not key.strip().isidentifier():
                raise ConfigurationError(
                    f"{what} {value!r}: settings read name=value, separated by commas, as in"
                    " adl:accumulate=4."
                )
            key = key.strip()
            if key == "name":  # the key of the name itself in a table
                raise ConfigurationError(
                    f"{what} {value!r}: name is no setting; the name is what stands before the"
                    " colon. Leave it out."
                )
            if key in settings:
                raise ConfigurationError(f"{what} {value!r}: {key} is there twice: give one.")
            settings[key] = read_value(text.strip())
        return cls(name.strip(), settings)

    def __str__(self) -> str:
        settings = spell_settings(self.settings)
        return f"{self.name}:{settings}" if settings else self.name


def spell_settings(settings: Mapping[str, Any]) -> str:
    """
    >>> spell_settings({"hidden": (64, 32), "one": (64,), "bias": True})
    'hidden=64,32,one=64,,bias=True'
    """
    return ",".join(f"{key}={_spell_value(value)}" for key, value in settings.items())


def _spell_value(value: Any) -> str:
    """Tuples of numbers without brackets, which a shell would want quoted."""
    numbers = isinstance(value, list | tuple) and all(type(v) in (int, float) for v in value)
    if not numbers or not value:
        return str(value)
    return ",".join(map(str, value)) + ("," if len(value) == 1 else "")


def split_choices(text: str) -> list[str]:
    """The parts of ``pipedream+spike-compensation``; the plus of ``1e+3`` joins nothing."""
    return re.split(r"\s*\+\s*(?=[A-Za-z])", text)


def spell(value: Any) -> str:
    """A setting as the command line has it."""
    if isinstance(value, list | tuple):
        return ",".join(map(spell, value)) or "none"
    return str(value)


def _split_settings(text: str) -> list[str]:
    """Splits at commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _with_tuples(parts: Sequence[str]) -> list[str]:
    """Numbers behind a comma belong to the value before them: ``hidden=64,32`` is a tuple, and so
    is ``hidden=64,``.

    >>> _with_tuples(["hidden=64", "32", "bias=True", "one=4", ""])
    ['hidden=(64,32,)', 'bias=True', 'one=(4,)']
    """
    made: list[list[str]] = []
    for part in parts:
        if made and "=" not in part and (not part.strip() or _is_number(part)):
            made[-1].append(part)
        else:
            made.append([part])
    written = []
    for first, *more in made:
        key, equals, value = first.partition("=")
        if more and _is_number(value):
            first = f"{key}{equals}({','.join([value, *filter(str.strip, more)])},)"
        elif any(part.strip() for part in more):
            written += [first, *more]
            continue
        written.append(first)
    return [part for part in written if part.strip()]


def _is_number(text: str) -> bool:
    return type(read_value(text.strip())) in (int, float)


def read_value(text: str) -> Any:
    """A number, a tuple, true or false, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: very deep nests
        return text
