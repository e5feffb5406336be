"""The public API as it was last written down, in tests/golden/api.txt.

Whoever changes it says so in the CHANGELOG, in a line that begins with "- API:" and names what has
changed, as `Trainer.step`. After a release the file is written anew: python tests/test_api.py
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import offbeat

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "api.txt"


def api() -> dict[str, str]:
    """Every public name, with what it takes."""
    lines: dict[str, str] = {}
    for name in offbeat.__all__:
        value = getattr(offbeat, name)
        lines[name] = _written(value)
        if inspect.isclass(value):
            lines |= {f"{name}.{member}": text for member, text in _members(value)}
    return lines


def _written(value: Any) -> str:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"class({bases}){_signature(value)}"
    return _signature(value) if callable(value) else type(value).__name__


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """Its own and what it inherits from offbeat; fields of dataclasses are in its signature."""
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    owners = {name: owner for owner in kind.__mro__[::-1] for name in vars(owner)}
    for name, owner in sorted(owners.items(), key=lambda pair: pair[0]):
        if name.startswith("_") or name in fields or not owner.__module__.startswith("offbeat"):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, property):
            yield name, "property"
        elif isinstance(value, classmethod | staticmethod):
            yield name, f"{type(value).__name__}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield name, _signature(value)


def _signature(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return "()"
    # Names, kinds and defaults are the promise; how annotations are written differs by version.
    own = [p for p in parameters if p.name not in ("self", "cls")]
    bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in own])
    return re.sub(r" at 0x[0-9a-f]+", "", str(bare))


def written_down() -> dict[str, str]:
    lines = GOLDEN.read_text().splitlines()
    return {name: text for name, _, text in (line.partition(" ") for line in lines)}


def unsaid(now: dict[str, str], before: dict[str, str], changelog: str) -> list[str]:
    """Names whose change no line of the changelog tells."""
    told = " ".join(re.findall(r"^- API:.*$", changelog, re.MULTILINE))
    named = set(re.findall(r"`([^`]+)`", told))
    changed = [n for n in sorted({*now, *before}) if now.get(n) != before.get(n)]
    return [n for n in changed if n not in named and n.partition(".")[0] not in named]


def test_a_change_of_the_api_is_in_the_changelog() -> None:
    found = unsaid(api(), written_down(), (ROOT / "CHANGELOG.md").read_text())
    assert not found, (
        f"the public API has changed: {found}. Is that meant? Then say so in CHANGELOG.md, in a"
        f" line as: - API: `{found[0]}` takes ..."
    )


def test_what_counts_as_a_change() -> None:
    before = {"Trainer": "class(Status)(model)", "Trainer.step": "(x, y)", "launch": "(run)"}
    now = {"Trainer": "class(Status)(model)", "Trainer.step": "(x)", "untie": "(model)"}
    assert unsaid(now, before, "") == ["Trainer.step", "launch", "untie"]
    said = "- API: `Trainer.step` takes x alone; `launch` is gone.\n- `untie` is new."
    assert unsaid(now, before, said) == ["untie"]
    assert unsaid(before, before, "") == []


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{name} {text}\n" for name, text in api().items()))
