"""Values from JSON that anybody may have edited: the kind that is wanted, or nothing."""

import math
from typing import Any


def mapping(value: object) -> dict[str, Any]:
    """A dictionary with names as keys; empty for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def listing(value: object) -> list[Any]:
    """A list; empty for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """An integer, also one written as text: JSON's keys are."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def count(value: object) -> int | None:
    """An integer of at least one, or None."""
    found = whole(value)
    return found if found is not None and found >= 1 else None


def name_of(value: object) -> str | None:
    """A name, given alone or as ``{"name": ...}``."""
    name = value if isinstance(value, str) else mapping(value).get("name")
    return None if name is None else str(name)
