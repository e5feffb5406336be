"""Results on disk: one row a line, so that a file is short to read and kind to diffs.

A plain list of rows is a file of JSON lines. A result that is nested, with its setting above its
rows, is JSON lines as well: each line says at which keys it belongs, and has the fields of what is
there, or, where that is no dictionary, what it is.

    {"at": ["resnet20", "environment"], "cpu": "...", "cores": 2}
    {"at": ["resnet20", "waves", 0, "rounds", 0, "one-core"], "seconds": 0.604, ...}
    {"at": ["resnet20", "rounds"], "is": 6}
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Keys = tuple[str | int, ...]


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def read_result(path: Path) -> Any:
    """What ``write_result`` wrote, or a file of plain JSON."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    top: list[Any] = [None]
    for row in read_rows(path):
        _put(top, (0, *row.pop("at")), row.get("is", row))
    return top[0]


def write_result(path: Path, result: Any, *rows: str) -> None:
    """``rows``: where the rows are, by keys with a star for any, such as "*.turns.*".

    What is no row and has none in it becomes one line.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(result, indent=1) + "\n")
        return
    patterns = [tuple(row.split(".")) for row in rows]
    found = (json.dumps(_line(at, part)) + "\n" for at, part in _parts(result, patterns, ()))
    path.write_text("".join(found))


def _parts(part: Any, rows: Iterable[tuple[str, ...]], at: Keys) -> Iterator[tuple[Keys, Any]]:
    below = [row for row in rows if len(row) > len(at) and _fits(row, at)]
    if not below or not part or not isinstance(part, dict | list):
        yield at, part
        return
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield from _parts(value, below, (*at, key))


def _fits(row: tuple[str, ...], at: Keys) -> bool:
    return all(name in ("*", key) for name, key in zip(row, at, strict=False))


def _line(at: Keys, part: Any) -> Row:
    if isinstance(part, dict) and not {"at", "is"} & part.keys():
        return {"at": at, **part}
    return {"at": at, "is": part}


def _put(into: Any, at: tuple[Any, ...], part: Any) -> None:
    """Rows come in their order, so a list grows at its end."""
    for key, inner in pairwise(at):
        if isinstance(into, list) and (key == len(into) or into[key] is None):
            into[key:] = [[] if isinstance(inner, int) else {}]
        elif isinstance(into, dict):
            into.setdefault(key, [] if isinstance(inner, int) else {})
        into = into[key]
    if isinstance(into, list):
        into[at[-1] :] = [part]
    else:
        into[at[-1]] = part
