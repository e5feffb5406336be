"""A run on disk: what was asked for, what happened, what came out.

A folder holds

    config.json     the whole configuration, versions, seed and command
    metrics.jsonl   one JSON object per line, in the order in which things happened
    ledger.jsonl    the last actions of every stage: what a timeline is drawn from
    certificate.json  what "offbeat verify" checks: lags, digests of the files
    summary.json    the end: scores, lags, memory, waits; also after Ctrl-C
    model.safetensors  the final weights, names of the unsplit model; model.pt if asked for
    readings.jsonl  what monitors read, where the run had any
    checkpoints/    where ``--resume`` goes on, if any were saved

Every file is whole: one that cannot be written leaves what was there, and says so.

``metrics.jsonl`` has lines of three kinds, each with ``kind``, ``step``, ``epoch`` and ``time_s``
(seconds since the start): ``step`` (``loss``, ``rows_per_s``, ``lr``), ``evaluation`` (``loss``,
``accuracy`` or None, ``rows``, ``of``) and ``end`` (``status``: finished, interrupted or failed).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigurationError, StorageError
from offbeat.records import disk
from offbeat.records.ledger import Ledger
from offbeat.records.lock import Lock, holder, state_of, this_process
from offbeat.records.readings import Readings

CONFIG, METRICS, LEDGER = "config.json", "metrics.jsonl", "ledger.jsonl"
SUMMARY, MODELS = "summary.json", ("model.safetensors", "model.pt")
READINGS, CHECKPOINTS, CERTIFICATE = "readings.jsonl", "checkpoints", "certificate.json"
RESULTS = (LEDGER, SUMMARY, *MODELS, READINGS, CHECKPOINTS, CERTIFICATE)


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

    @property
    def goes_on(self) -> bool:
        """Whether a process that lives writes there, as far as this machine can see."""
        if self.summary:
            return False
        claim = holder(self.folder) or {}
        with suppress(KeyError, TypeError):  # a lock that a hand has written
            return any(state_of(process) == "lives" for process in claim.get("processes", ()))
        return False

    def ledger(self) -> Ledger | None:
        """The last actions, if they were kept."""
        path = _refuse_link(self.folder / LEDGER)
        return Ledger.load(path) if path.exists() else None

    def readings(self) -> Readings | None:
        """What its monitor read, if it had one."""
        path = _refuse_link(self.folder / READINGS)
        return Readings.load(path) if path.exists() else None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder belongs to this process: another that would write a run there is refused."""
    lock = Lock(folder)
    try:
        lock.take([this_process()])
    except StorageError as error:
        raise ConfigurationError(f"{error}") from None
    except OSError as error:
        raise _no_place(folder, error) from None
    try:
        yield
    finally:
        lock.release()


def _no_place(folder: Path, error: OSError) -> ConfigurationError:
    words = disk.in_words(error)
    return ConfigurationError(
        f"{folder} cannot be written to: {words}. Give another folder (--out)."
    )


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
        for name in (CONFIG, METRICS, *RESULTS):
            _refuse_link(folder / name)
        if not (folder / CONFIG).exists():
            for name in (METRICS, *RESULTS):
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
            self._metrics = disk.Growing(folder / METRICS)
            self.lines = _cut_after(self._metrics, keep_lines or 0)
        except StorageError:
            raise
        except OSError as error:
            raise _no_place(folder, error) from None

    def add(self, kind: str, **values: Any) -> None:
        self._metrics.add(f"{json.dumps({'kind': kind, **values})}\n".encode())
        self.lines += 1

    def finish(
        self,
        outcome: Mapping[str, Callable[[Path], None]],
        end: Callable[[], None],
        summary: dict[str, Any],
        told: dict[str, Any] | None = None,
    ) -> None:
        """Writes what came out, and the summary whatever else cannot be written.

        ``outcome``: by name of file, who writes it. ``end``: adds the last line. ``told``: the
        ledger's certificate.
        """
        trouble: StorageError | None = None
        files = (partial(write, self.folder / name) for name, write in outcome.items())
        actions: list[Callable[[], None]] = [*files, end]
        if told is not None:
            actions.append(lambda: self._certify(told, [*outcome], summary.get("guards", {})))
        for action in actions:
            try:
                action()
            except StorageError as error:
                trouble = trouble or error
        # A run that has not stored what came out is not finished: --resume stores it then.
        _write_json(self.folder / SUMMARY, summary | ({"status": "failed"} if trouble else {}))
        self.close()
        if trouble is not None:
            raise trouble

    def _certify(self, told: dict[str, Any], names: list[str], guards: dict[str, Any]) -> None:
        results = {}
        for name in names:
            if not (self.folder / name).exists():  # it could not be written
                continue
            with disk.reading(self.folder / name) as file:
                results[name] = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        kinds = ("skipped", "rolled_back")
        dropped = {place: {kind: of[kind] for kind in kinds} for place, of in guards.items()}
        whole = {**told, "dropped": dropped, "results": results}
        _write_json(self.folder / CERTIFICATE, whole)

    def close(self) -> None:
        self._metrics.close()


def _refuse_link(path: Path) -> Path:
    if path.is_symlink():
        raise ConfigurationError(
            f"{path} is a link, and links in a run's folder are not followed: put what lies behind"
            " it in its place."
        )
    return path


def _cut_after(file: disk.Growing, lines: int) -> int:
    """Cuts a file after so many lines; returns how many there were."""
    with file.path.open("rb") as reader:
        kept = [len(line) for _, line in zip(range(lines), reader, strict=False)]
    file.cut(sum(kept))
    return len(kept)


def _write_json(path: Path, value: Any) -> None:
    disk.write(path, disk.sealed(value))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return disk.unsealed(_refuse_link(path).read_bytes())[0]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}. Is it damaged? Where you have changed it yourself,"
            " take out its digest."
        ) from None


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = _refuse_link(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Is it damaged?") from None
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number == len(lines):  # a run that was killed while it wrote
                return
            raise ConfigurationError(f"{path}, line {number}: not JSON. Is it damaged?") from None
