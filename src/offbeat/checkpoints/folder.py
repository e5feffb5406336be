"""Checkpoints on disk.

    checkpoints/
        .lock                                   whose folder this is, while a run saves here
        step-000050/
            manifest.json                       what it is, and size and digest of every file
            replica-0-stage-0.safetensors       one file per stage
            replica-0-stage-1.safetensors
        .step-000100.partial/                   being written, or left by a crash
        .step-000050.replaced.partial/          until a second one of step 50 is in its place

A checkpoint is written aside and renamed when its manifest, the last file, is on disk. What has no
manifest is no checkpoint.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from offbeat.checkpoints import tensorfile
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.records import disk

MANIFEST, DATA, MODEL = "manifest.json", "data.safetensors", "model.safetensors"
PICKLED = "model.pt"
"""Where drained checkpoints of older versions have the weights."""
FORMAT = 3
_WITHOUT_DIGEST = 2
"""The format before, which is read too."""
_ALWAYS = ("kind", "data", "versions", "threads", "model", "method", "stages", "cuts")
"""What every manifest says. Facts that were added later may be missing."""
_NAME = re.compile(r"step-(\d{6,})")
_REPLACED = re.compile(r"\.step-(\d{6,})\.replaced\.partial")


def file_of(replica: int, stage: int) -> str:
    return f"replica-{replica}-stage-{stage}.safetensors"


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}"


def partial_of(folder: Path, step: int) -> Path:
    return folder / f".step-{step:06}.partial"


def replaced_of(folder: Path, step: int) -> Path:
    return folder / f".step-{step:06}.replaced.partial"


@dataclass(frozen=True)
class Found:
    """A folder that claims to be a checkpoint."""

    path: Path
    step: int
    manifest: dict[str, Any]
    """Empty where it cannot be used."""
    stamp: str
    """Tells it from every other, of another run or step."""
    trouble: str | None = None
    """Why it cannot."""

    @classmethod
    def at(cls, path: Path, step: int) -> "Found":
        if path.is_symlink():
            words = "it is a link, and links in here are not followed"
            return cls(path, step, {}, path.name, words)
        stamp = path.name
        try:
            content = disk.read(path / MANIFEST)
            stamp = sha256(content).hexdigest()
            manifest, has_digest = disk.unsealed(content)
        except OSError as error:
            return cls(path, step, {}, stamp, f"{MANIFEST} cannot be read ({disk.in_words(error)})")
        except json.JSONDecodeError:
            return cls(path, step, {}, stamp, f"{MANIFEST} cannot be read: it is no JSON")
        except (ValueError, RecursionError) as error:
            return cls(path, step, {}, stamp, f"{MANIFEST} cannot be used: {error}")
        trouble = _trouble_of(manifest, has_digest)
        return cls(path, step, {} if trouble else manifest, stamp, trouble)

    def problem(self, names: list[str]) -> str | None:
        """Why these files of the checkpoint cannot be used, if they cannot."""
        if self.trouble is not None:
            return self.trouble
        for name in names:
            entry = self.manifest["files"].get(name)
            if entry is None:
                return f"it has no {name}"
            try:
                written = tensorfile.examine(self.path / name)
            except OSError as error:
                return f"{name} cannot be read ({disk.in_words(error)})"
            if written["bytes"] != entry["bytes"]:
                return f"{name} has {written['bytes']} bytes instead of {entry['bytes']}"
            if written["sha256"] != entry["sha256"]:
                return f"{name} has been changed or damaged (its digest differs)"
        return None


def _trouble_of(manifest: dict[str, Any], has_digest: bool) -> str | None:
    """Why a checkpoint of this manifest cannot be used, if it cannot."""
    if manifest.get("format") != (FORMAT if has_digest else _WITHOUT_DIGEST):
        if manifest.get("format") == FORMAT:
            return f"{MANIFEST} has lost its digest: it has been changed or damaged"
        return (
            f"it has format {manifest.get('format')}, and this version of offbeat reads"
            f" {FORMAT}; the version that saved it can go on from it"
        )
    for fact in ("files", *_ALWAYS):
        if fact not in manifest or not _SENSIBLE.get(fact, _anything)(manifest[fact]):
            return f"{MANIFEST} does not say {fact!r}: it has been changed or damaged"
    if manifest["stages"] > len(manifest["files"]):
        return f"{MANIFEST} has fewer files than stages: it has been changed or damaged"
    return None


def _anything(_: Any) -> bool:
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_file(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() >= {"bytes", "sha256"}


_SENSIBLE: dict[str, Callable[[Any], bool]] = {
    "files": lambda files: isinstance(files, dict) and all(map(_is_file, files.values())),
    "model": lambda model: isinstance(model, dict),
    "versions": lambda versions: isinstance(versions, dict) and "torch" in versions,
    "stages": _is_count,
    "kind": lambda kind: kind in ("exact", "drained"),
}
"""What a fact of a manifest must be like, so that it can be compared."""


def candidates(folder: Path) -> list[Found]:
    """Every checkpoint with a manifest, newest first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if replaced := _REPLACED.fullmatch(path.name):  # by nothing, if a crash came in between
            name = None if place_of(folder, int(replaced[1])).exists() else replaced
        if name and (path / MANIFEST).exists():
            found.append(Found.at(path, int(name[1])))
    return sorted(found, key=lambda each: -each.step)


def name_of(path: Path) -> str | None:
    """What a checkpoint is called in its folder, whatever it is now; None for anything else.

    Other things have a file called manifest.json, too.
    """
    if _NAME.fullmatch(path.name) or _REPLACED.fullmatch(path.name):
        return path.name if (path / MANIFEST).exists() else None
    manifest = Found.at(path, 0).manifest
    return place_of(path, manifest["step"]).name if "kind" in manifest else None


def publish(
    folder: Path, step: int, manifest: dict[str, Any], keep: int, known: Collection[str]
) -> str:
    """Makes a checkpoint of the files written aside, then deletes what is not needed any more.

    ``known``: stamps of what may be deleted. Returns that of the new one.
    """
    aside, place = partial_of(folder, step), place_of(folder, step)
    for stranger in set(os.listdir(aside)) - set(manifest["files"]):
        disk.remove(aside / stranger)  # of an earlier attempt that was killed
    content = disk.sealed(manifest)
    disk.write(aside / MANIFEST, content)
    # One of the same step is replaced: it is damaged, or the run has changed since without a step.
    if os.path.lexists(place):
        _delete(replaced_of(folder, step))  # or nothing could take its name
        place.rename(replaced_of(folder, step))
    aside.rename(place)
    disk.settle(folder)
    stamp = sha256(content.encode()).hexdigest()
    _tidy(folder, step, keep, {*known, stamp})
    return stamp


def _tidy(folder: Path, newest: int, keep: int, known: Collection[str]) -> None:
    """Deletes all but the newest ``keep``, and what crashes have left behind."""
    everything = candidates(folder)
    found = [each for each in everything if each.stamp in known]
    # What is newer than the step just saved was passed over when the run was taken up again.
    superseded = [each for each in found if each.step > newest]
    kept = [each for each in found if each.step <= newest][:keep]
    for each in found:
        if each in superseded or each not in kept:
            _delete(each.path)
    for path in set(folder.iterdir()) - {each.path for each in everything}:
        left = path.name.startswith(".step-") and path.name.endswith(".partial")
        if left or (_NAME.fullmatch(path.name) and not (path / MANIFEST).exists()):
            disk.remove(path)


def _delete(path: Path) -> None:
    if not path.is_symlink():
        (path / MANIFEST).unlink(missing_ok=True)  # first: from here on it is no checkpoint
    disk.remove(path)


def refuse_strange(folder: Path, known: Collection[str] | None) -> None:
    """A run that did not begin here must not overwrite, nor delete, what lies here.

    ``known``: stamps of what was here when it looked; None where it did not.
    """
    found = [each for each in candidates(folder) if each.stamp not in (known or ())]
    if found:
        why = (
            "did not resume from them. Call resume() before the first step"
            if known is None
            else "did not see them when it looked: another has saved here since. Start it again"
        )
        raise CheckpointError(
            f"{folder} already holds checkpoints, the newest of step {found[0].step}, and this run"
            f" {why}, or give another folder."
        )


def refuse_misplaced(folder: Path) -> None:
    """What looks like a place of checkpoints and is none would start a run anew."""
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file: give the folder that save() was given.")
    name = name_of(folder)
    if name is not None:
        again = "" if name == folder.name else f", and call it {name} again"
        raise ConfigurationError(
            f"{folder} is a checkpoint itself: give the folder around it, {folder.parent}{again}."
        )
    inner = folder / "checkpoints"
    if candidates(inner) and not candidates(folder):
        raise ConfigurationError(f"{folder} has its checkpoints in {inner}: give that folder.")
