"""What can go wrong, as one tree.

    OffbeatError
    ├── ConfigurationError   an argument breaks a rule; nothing was started  (also a ValueError)
    ├── BatchError           one batch cannot be trained on; the run is intact  (also a ValueError)
    ├── ScheduleError        a table of actions breaks a rule  (also a ValueError)
    │   └── Deadlock         workers wait for each other in a circle
    ├── StageError           a stage did something its rule cannot support  (also a RuntimeError)
    ├── GuardError           a guard ended the run: not finite, too stale  (also a RuntimeError)
    ├── StoppedError         an earlier error ended this run  (also a RuntimeError)
    ├── IncompleteModel      weights were read that another process trains  (also a RuntimeError)
    ├── WorkerLost           another process failed or went silent  (also a RuntimeError)
    ├── CheckpointError      a checkpoint cannot be written, read or resumed  (also a RuntimeError)
    ├── StorageError         any other file cannot be written  (also an OSError)
    └── MissingExtra         an optional package is not installed  (also an ImportError)

Every message names the value, the rule and the next step.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class OffbeatError(Exception):
    """The root: ``except OffbeatError`` catches everything this library raises on purpose."""


class ConfigurationError(OffbeatError, ValueError):
    """An argument breaks a rule. Raised before anything is started."""


class BatchError(OffbeatError, ValueError):
    """One batch cannot be trained on. It was not started, and the trainer can go on."""


class ScheduleError(OffbeatError, ValueError):
    """A table of actions breaks a rule."""


class Deadlock(ScheduleError):
    """Every unfinished worker waits for a message that nobody will send."""


class StageError(OffbeatError, RuntimeError):
    """A stage returned or did something its backward rule cannot support."""


class GuardError(OffbeatError, RuntimeError):
    """A loss or gradient was not finite, or older than allowed, and the run was to stop there."""


class StoppedError(OffbeatError, RuntimeError):
    """An earlier error left stages at different batches, so the run cannot go on."""


class IncompleteModel(OffbeatError, RuntimeError):
    """Values of the model were read that another process trains, and that are old in this one."""


class WorkerLost(OffbeatError, RuntimeError):
    """Another process failed, died or was silent for too long; ``rank``: of a broken connection."""

    def __init__(self, words: str, *, rank: int | None = None) -> None:
        super().__init__(words)
        self.rank = rank


class CheckpointError(OffbeatError, RuntimeError):
    """A checkpoint cannot be written, read or resumed from. The run itself is intact."""


class StorageError(OffbeatError, OSError):
    """A file cannot be written; what was there before is as it was. ``errno``: why."""

    def __init__(self, words: str, errno: int | None = None) -> None:
        super().__init__(words)
        self.errno = errno


class MissingExtra(OffbeatError, ImportError):
    """An optional package is not installed; the message has the line that installs it."""


def unknown(what: str, value: object, known: Iterable[str]) -> ConfigurationError:
    """The error for a name that is not in a list: the nearest name, then all of them."""
    known, text = list(known), str(value).lower()
    begun = [name for name in known if text and name.startswith(text)]
    near = begun or get_close_matches(text, known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigurationError(f"unknown {what} {value!r}.{hint} Known: {', '.join(known)}.")
