"""A run on disk: what was asked for, what happened, what came out.

A folder holds

    config.json     the whole configuration, versions, seed and command
    metrics.jsonl   one JSON object per line, in the order in which things happened
    ledger.jsonl    the last actions of every stage: what a timeline is drawn from
    summary.json    the end: scores, lags, memory, waits; also after Ctrl-C
    model.pt        the final weights, names of the unsplit model
    readings.jsonl  what monitors read, where the run had any
    checkpoints/    where ``--resume`` goes on, if any were saved

``metrics.jsonl`` has lines of three kinds, each with ``kind``, ``step``, ``epoch`` and ``time_s``
(seconds since the start): ``step`` (``loss``, ``rows_per_s``, ``lr``), ``evaluation`` (``loss``,
``accuracy`` or None, ``rows``, ``of``) and ``end`` (``status``: finished, interrupted or failed).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from offbeat.errors import ConfigurationError
from offbeat.records.ledger import Ledger
from offbeat.records.readings import Readings

CONFIG, METRICS, LEDGER = "config.json", "metrics.jsonl", "ledger.jsonl"
SUMMARY, MODEL = "summary.json", "model.pt"
READINGS, CHECKPOINTS = "readings.jsonl", "checkpoints"


@dataclass(frozen=True)
class Run:
    """A stored run, read."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    """Empty while the run goes on, or when it was killed."""

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise ConfigurationError(
                f"{folder} is not a run: it has no {CONFIG}. Give a folder written by"
                " 'offbeat train'."
            )
        config = _read_json(folder / CONFIG)
        summary = _read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else {}
        metrics = list(_read_lines(folder / METRICS)) if (folder / METRICS).exists() else []
        return cls(folder, config, metrics, summary)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def ledger(self) -> Ledger | None:
        """The last actions, if they were kept."""
        path = self.folder / LEDGER
        return Ledger.load(path) if path.exists() else None

    def readings(self) -> Readings | None:
        """What its monitor read, if it had one."""
        path = self.folder / READINGS
        return Readings.load(path) if path.exists() else None


class RunWriter:
    """Writes a run as it happens; every line is on disk before the next is made."""

    def __init__(self, folder: Path, config: dict[str, Any], keep_lines: int | None = None) -> None:
        """Makes the folder, which must not hold a run yet.

        ``keep_lines``: goes on with the run that is there, after so many lines of metrics.
        """
        self.folder = folder
        if keep_lines is None and (folder / CONFIG).exists():
            raise ConfigurationError(
                f"{folder} already holds a run, and nothing is overwritten: give another folder"
                " (--out), go on with this one (--resume), or move it away."
            )
        if not (folder / CONFIG).exists():
            for name in (METRICS, LEDGER, SUMMARY, MODEL, READINGS, CHECKPOINTS):
                if (folder / name).exists():
                    raise ConfigurationError(
                        f"{folder} holds {name}, which is of no run and would be overwritten: give"
                        " another folder (--out), or move it away."
                    )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / CONFIG).exists():
                _write_json(folder / CONFIG, config)
            (folder / SUMMARY).unlink(missing_ok=True)  # of an end that was not the last
            self._metrics: TextIO = (folder / METRICS).open("a+", buffering=1)
            self.lines = _cut_after(self._metrics, keep_lines or 0)
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be written to: {error.strerror}. Give another folder (--out)."
            ) from None

    def add(self, kind: str, **values: Any) -> None:
        self._metrics.write(json.dumps({"kind": kind, **values}) + "\n")
        self.lines += 1

    def finish(self, summary: dict[str, Any], ledger: Ledger) -> None:
        ledger.save(self.folder / LEDGER)
        _write_json(self.folder / SUMMARY, summary)
        self.close()

    def close(self) -> None:
        self._metrics.close()


def _cut_after(file: TextIO, lines: int) -> int:
    """Cuts a file after so many lines; returns how many there were."""
    file.seek(0)
    count = sum(1 for _ in zip(range(lines), iter(file.readline, ""), strict=False))
    file.truncate(file.tell())
    return count


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Is it damaged?") from None
    return value


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Is it damaged?") from None
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number == len(lines):  # a run that was killed while it wrote
                return
            raise ConfigurationError(f"{path}, line {number}: not JSON. Is it damaged?") from None
