"""Whether a stored run is what it says: its lags within what was declared, its files as written."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.app.runs import CERTIFICATE, CHECKPOINTS, CONFIG
from offbeat.checkpoints.folder import MANIFEST, candidates
from offbeat.errors import ConfigurationError
from offbeat.records import disk
from offbeat.records.certificate import FORMAT, excess, trouble_of
from offbeat.records.rows import Part
from offbeat.records.tally import Tally

Finding = tuple[bool, str]
"""Whether it holds, and what."""


def verify_run(folder: Path) -> Iterator[Finding]:
    """Everything that can be checked of a run's folder, or of one with checkpoints alone."""
    told = _read(folder / CERTIFICATE)
    checkpoints = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found = candidates(checkpoints)
    if told is None and not found:
        raise ConfigurationError(
            f"{folder} has neither {CERTIFICATE} nor checkpoints: give the folder of a run that has"
            " ended, or that save() was given."
        )
    if told is not None:
        yield from _lags(told)
        for name, digest in told.get("results", {}).items():
            yield _compare(folder / name, digest)
        if (folder / CONFIG).exists():
            _read(folder / CONFIG)
            yield True, f"{CONFIG} is as it was written"
        for part in told["files"]:
            yield from _rows(checkpoints, part, told)
    for each in found:
        problem = each.problem(list(each.manifest.get("files", ())))
        yield problem is None, f"{each.path.name} {problem or 'is as it was written'}"
        stamp = (told or {}).get("checkpoints", {}).get(each.path.name, each.stamp)
        if problem is None and stamp != each.stamp:
            yield False, f"{each.path.name}/{MANIFEST} is not the one of this run"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        told, _ = disk.unsealed(disk.read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be used: {error}. Is it damaged?") from None
    if path.name != CERTIFICATE:
        return told
    if told.get("format") != FORMAT or told.get("declared") is None:
        raise ConfigurationError(
            f"{path} has format {told.get('format')}, and this version of offbeat checks {FORMAT},"
            " with declared lags."
        )
    if (trouble := trouble_of(told)) is not None:
        raise ConfigurationError(f"{path} cannot be used: {trouble}. Was it changed by hand?")
    return told


def _lags(told: dict[str, Any]) -> Iterator[Finding]:
    late = excess(told)
    count = sum(sum(line["lags"].values()) for line in told["stages"])
    bounds = " ".join(map(str, told["declared"]))
    if not late:
        yield True, f"{count} micro-batches were applied within the declared lags {bounds}"
    yield from ((False, words) for words in late)


def _compare(path: Path, digest: str) -> Finding:
    try:
        same = hashlib.sha256(disk.read(path)).hexdigest() == digest
    except OSError as error:
        return False, f"{path.name} cannot be read: {disk.in_words(error)}"
    return same, f"{path.name} {'is as it was written' if same else 'has been changed or damaged'}"


def _rows(folder: Path, told: dict[str, Any], whole: dict[str, Any]) -> Iterator[Finding]:
    """A ledger's file: its digest, and the lags that its own rows show."""
    part = Part(str(folder / Path(told["name"]).name), told["rows"], told["sha256"])
    digest, tally = hashlib.sha256(), Tally()
    try:
        for data in part.chunks():
            digest.update(data)
        tally.add(zip(*part, strict=True))
    except OSError as error:
        yield False, f"{told['name']} cannot be read: {error}"
        return
    if digest.hexdigest() != part.sha256:
        yield False, f"{told['name']} has been changed or damaged (its digest differs)"
        return
    counts = {(line["replica"], line["stage"]): line["lags"] for line in whole["stages"]}
    for place, line in tally.items():
        for lag, count in line.lags.items():
            if count > counts.get(place, {}).get(str(lag), 0):
                yield False, f"{told['name']}: more of lag {lag} at stage {place[1]} than is told"
    yield True, f"{told['name']}: {part.rows} rows are as they were written"
