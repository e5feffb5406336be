"""What a training run is asked to do: one value, read from flags or a TOML file.

Nothing here imports torch, so that ``offbeat train --help`` answers at once.
"""

import ast
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from offbeat.errors import ConfigurationError, unknown

Optimizer = Literal["sgd", "adam", "adamw", "muon"]
Decay = Literal["constant", "cosine", "linear", "step", "one-cycle"]


_LARGEST = 3e38


@dataclass(frozen=True)
class Choice:
    """A name and its settings: ``adl:accumulate=4``, or a table with ``name`` in a TOML file."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, value: Any, what: str) -> "Choice":
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            if not isinstance(value.get("name"), str):
                raise ConfigurationError(f'{what}: a table needs a name, as in name = "adl".')
            return cls(value["name"], {k: v for k, v in value.items() if k != "name"})
        name, _, rest = str(value).partition(":")
        settings: dict[str, Any] = {}
        for part in _split(rest):
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
            settings[key] = _value(text.strip())
        return cls(name.strip(), settings)

    def __str__(self) -> str:
        settings = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name}:{settings}" if settings else self.name


def joined(text: str) -> list[str]:
    """The parts of ``pipedream+spike-compensation``; the plus of ``1e+3`` joins nothing."""
    return re.split(r"\s*\+\s*(?=[A-Za-z])", text)


def spelled(value: Any) -> str:
    """A setting as the command line has it, also as it comes back from a stored run."""
    if isinstance(value, Mapping) and "name" in value:
        return str(Choice(value["name"], value.get("settings", {})))
    if isinstance(value, list | tuple):
        return ",".join(map(spelled, value)) or "none"
    return str(value)


def _split(text: str) -> list[str]:
    """Splits at commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in [*parts, text[start:]] if part.strip()]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: very deep nests
        return text


def plain(value: Any) -> Any:
    """As it comes back from JSON, where tuples are lists and keys are text, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def _by_field(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys with underscores; two spellings of one would lose a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in found:
            raise ConfigurationError(
                f"{name} is there twice{where}, with a dash and with an underscore: give one."
            )
        found[name] = value
    return found


def _help(text: str, default: Any = MISSING, *, metavar: str = "") -> Any:
    words = {"help": text, "metavar": metavar}
    if callable(default):
        return field(default_factory=default, metadata=words)
    return field(default=default, metadata=words)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run. Field names are the flags, with dashes, and the TOML keys."""

    model: Choice = _help(
        "A network of the zoo, as in resnet20 or gpt:layers=4,width=128.", Choice("digits-cnn"),
        metavar="NAME[:SETTINGS]",
    )  # fmt: skip
    data: Choice = _help(
        "Data of the zoo, as in cifar10 or text:unit=bytes.", Choice("digits"),
        metavar="NAME[:SETTINGS]",
    )  # fmt: skip
    data_folder: str | None = _help("Where the data lies, if not in the cache.", None)
    method: Choice = _help(
        "auto, or a name from 'offbeat methods', as in adl:accumulate=4.", Choice("synchronous"),
        metavar="NAME[:SETTINGS]",
    )  # fmt: skip
    correction: tuple[Choice, ...] = _help(
        "A name from 'offbeat corrections', as in predict:horizon=lag; several are joined by +, or"
        " given one by one.",
        (), metavar="NAME[:SETTINGS]",
    )  # fmt: skip
    monitor: bool = _help("Read how stale each stage is, and probe at every evaluation.", False)
    hybrid: int | None = _help("Epochs of the method; synchronous training follows.", None)
    stages: int | None = _help("How many stages, cut where their cost balances.", None)
    cuts: tuple[str, ...] = _help("Children or paths at which stages begin, as in 4,9.", ())
    ppv: tuple[int, ...] = _help("Weighted layers after which stages end, as in 2,5.", ())
    replicas: int = _help("Copies of the model, each on its part of every batch.", 1)
    averaging: Choice | None = _help(
        "How replicas are kept together, as in dasgd:every=4,delay=1.", None,
        metavar="NAME[:SETTINGS]",
    )  # fmt: skip
    optimizer: Optimizer = _help("sgd, adam, adamw or muon (AdamW for what is no matrix).", "sgd")
    lr: float = _help("Learning rate at its peak.", 0.1)
    momentum: float = _help("Of sgd and muon.", 0.9)
    weight_decay: float = _help("Of every optimizer.", 0.0)
    decay: Decay = _help(
        "How the learning rate falls: constant, cosine, linear, step, one-cycle.", "cosine"
    )
    warmup: int = _help("Updates in which the learning rate rises.", 0)
    milestones: tuple[float, ...] = _help(
        "With step: shares of the run after which it falls to a tenth, as in 0.5,0.75.", (0.5, 0.75)
    )
    clip: float | None = _help("Bound on the gradient norm.", None)
    nonfinite: str | None = _help(
        "About gradients that are not finite: warn, stop, skip or roll-back.", None
    )
    max_lag: int | None = _help("Bound on the lag, in updates; refused and measured.", None)
    epochs: int = _help("Passes over the training data.", 5)
    max_steps: int | None = _help(
        "Stop after so many updates; the learning rate falls as for all --epochs.", None
    )
    batch_size: int = _help("Rows per update, over all replicas.", 64)
    drop_last: bool = _help("Leave out a short last batch.", False)
    augment: bool = _help("Random crops and flips where the data has them.", True)
    seed: int = _help("Of weights, order, augmentation and dropout.", 0)
    device: str = _help("As in cpu or cuda.", "cpu")
    engine: str | None = _help(
        "serial, processes or streams (side by side on one GPU); by default as started.", None
    )
    balance: str = _help("How --stages cuts: by counted arithmetic or by measured time.", "counted")
    compile: bool = _help("Every stage through torch.compile.", False)
    autocast: bool = _help("Forward passes in bfloat16 where PyTorch allows.", False)
    evaluate_every: int = _help("Epochs between evaluations.", 1)
    save_every: int | None = _help("Steps between checkpoints, for --resume.", None)
    keep: int = _help("How many checkpoints stay on disk.", 3)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str = "") -> "Experiment":
        """From flags or a TOML table: names checked, texts turned into what a field holds."""
        known = {f.name: f for f in fields(cls)}
        made = {}
        for name, value in _by_field(values, where).items():
            if name not in known:
                raise unknown(f"setting{where}", name, sorted(known))
            if name == "method" and isinstance(value, str) and len(joined(value)) > 1:
                method, *rest = joined(value)
                raise ConfigurationError(
                    f"method {value!r}: corrections have a setting of their own. Give method"
                    f" {method} and correction {'+'.join(rest)}."
                )
            made[name] = _typed(known[name].type, value, name)
        experiment = cls(**made)
        experiment._check()
        return experiment

    @classmethod
    def from_toml(cls, path: str | Path) -> dict[str, Any]:
        """What a file says, by field, for :meth:`read`."""
        try:
            return _by_field(tomllib.loads(Path(path).read_text()), f" in {path}")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path} is not TOML: {error}.") from None

    def _check(self) -> None:
        for name in ("epochs", "batch_size", "replicas", "evaluate_every", "keep", "save_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: give at least 1.")
        if not -(2**63) <= self.seed < 2**64:  # what torch.manual_seed takes
            raise ConfigurationError(
                f"seed={self.seed}: give a whole number of 64 bits, {-(2**63)} to {2**64 - 1}."
            )
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigurationError(f"max_steps={self.max_steps}: give at least 1.")
        if self.warmup < 0:
            raise ConfigurationError(f"warmup={self.warmup}: give a number of updates, 0 or more.")
        if not self.lr > 0:
            raise ConfigurationError(f"lr={self.lr}: give a number above 0.")
        for name in ("lr", "momentum", "weight_decay"):
            if not abs(getattr(self, name)) <= _LARGEST:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}: give a number that float32 can hold, below"
                    f" {_LARGEST:g}."
                )
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum={self.momentum}: give a number from 0 to below 1.")
        for share in self.milestones:
            if not 0 < share < 1:
                raise ConfigurationError(
                    f"milestones={','.join(map(str, self.milestones))}: give shares of the run,"
                    " above 0 and below 1."
                )
        if self.optimizer not in get_args(Optimizer):
            raise unknown("optimizer", self.optimizer, get_args(Optimizer))
        if self.decay not in get_args(Decay):
            raise unknown("decay", self.decay, get_args(Decay))
        if self.hybrid is not None and not 0 < self.hybrid < self.epochs:
            raise ConfigurationError(
                f"hybrid={self.hybrid} of epochs={self.epochs}: the method runs for the first of"
                " them and synchronous training for the rest, so give fewer than all."
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as stored with a run; :meth:`read` takes them back."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(getattr(self, name), Choice):
                found[name] = {"name": value["name"], "settings": value["settings"]}
        return found


def _number(value: Any) -> float:
    number = float(value)
    if number != number:
        raise ValueError
    return number


def _typed(kind: Any, value: Any, name: str) -> Any:
    """A value as its field holds it; text from the command line is read."""
    if isinstance(kind, UnionType):
        if value in (None, "none", "None"):
            return None
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    try:
        if kind is Choice:
            if isinstance(value, Mapping) and set(value) == {"name", "settings"}:
                value = {"name": value["name"], **value["settings"]}
            return Choice.read(value, name)
        if get_origin(kind) is tuple:
            inner = _number if get_args(kind)[0] is float else get_args(kind)[0]
            if inner is Choice:
                listed = [value] if isinstance(value, str | Mapping | Choice) else list(value)
                choices: list[Any] = []
                for given in listed:
                    choices += joined(given) if isinstance(given, str) else [given]
                return tuple(_typed(Choice, choice, name) for choice in choices)
            if isinstance(value, Mapping):
                raise ValueError
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(inner(str(part).strip()) for part in parts if str(part).strip())
        if kind is bool:
            if isinstance(value, bool):
                return value
            raise ValueError
        if kind is int and not isinstance(value, bool):
            return int(str(value))
        if kind is float and not isinstance(value, bool):
            return _number(value)
        if get_origin(kind) is Literal or kind is str:
            return str(value)
    except ConfigurationError:
        raise
    except (ValueError, TypeError):
        pass
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    wanted = words.get(kind, "numbers separated by commas")
    raise ConfigurationError(f"{name}={value!r}: give {wanted}.")
