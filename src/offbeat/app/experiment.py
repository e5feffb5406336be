"""What a training run is asked to do: one value, read from flags or a TOML file.

Nothing here imports torch, so that ``offbeat train --help`` answers at once.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from offbeat.errors import ConfigurationError, unknown
from offbeat.registry import Choice, spell, split_choices

Optimizer = Literal["sgd", "adam", "adamw", "muon"]
Decay = Literal["constant", "cosine", "linear", "step", "one-cycle"]
ModelFile = Literal["safetensors", "pt"]
Role = Literal["recipe", "run", "machine", "upkeep"]
"""What a setting is part of:

``recipe``   what plain training has too: runs that differ in it differ in more than staleness;
``run``      whatever else decides the outcome;
``machine``  where it runs and what is watched: a study reads a finished run whatever it says;
``upkeep``   what is stored and where: the same, and it may change when a run goes on.
"""


def _by_field(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys with underscores; two spellings of one would lose a value."""
    by_field: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in by_field:
            raise ConfigurationError(
                f"{name} is there twice{where}, with a dash and with an underscore: give one."
            )
        by_field[name] = value
    return by_field


def _setting(
    text: str, default: Any, *, role: Role = "run", least: int | None = None, study: str = ""
) -> Any:
    """``least``: of a number. ``study``: the option that a study has in place of this setting."""
    facts = {"help": text, "role": role, "least": least, "study": study}
    return field(default=default, metadata=facts)


_recipe = partial(_setting, role="recipe")
_machine = partial(_setting, role="machine")
_upkeep = partial(_setting, role="upkeep")


PARTS = {
    "model": "Model and data",
    "method": "Method",
    "stages": "Stages and replicas",
    "optimizer": "Optimizer and guards",
    "epochs": "Length and batches",
    "device": "Machine",
    "evaluate_every": "Evaluation and storage",
}
"""With which setting a part of the help begins, and its heading."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run. Field names are the flags, with dashes, and the TOML keys."""

    model: Choice = _recipe(
        "A network of the zoo, as in resnet20 or gpt:layers=4,width=128.", Choice("digits-cnn")
    )
    data: Choice = _recipe("Data of the zoo, as in cifar10 or text:unit=bytes.", Choice("digits"))
    data_folder: str | None = _upkeep("Where the data lies, if not in the cache.", None)
    method: Choice = _setting(
        "auto, or a name from 'offbeat methods', as in adl:accumulate=4.",
        Choice("synchronous"),
        study="--methods",
    )
    correction: tuple[Choice, ...] = _setting(
        "A name from 'offbeat corrections', as in predict:horizon=lag; several are joined by +, or"
        " given one by one.",
        (),
    )
    monitor: bool = _machine("Read how stale each stage is, and probe at every evaluation.", False)
    hybrid: int | None = _setting("Epochs of the method; synchronous training follows.", None)
    stages: int | None = _setting(
        "How many stages, cut where their cost balances.", None, study="--stage-counts"
    )
    cuts: tuple[str, ...] = _setting(
        "Children or paths at which stages begin, as in 4,9.", (), study="--stage-counts"
    )
    ppv: tuple[int, ...] = _setting(
        "Weighted layers after which stages end, as in 2,5.", (), study="--stage-counts"
    )
    replicas: int = _setting("Copies of the model, each on its part of every batch.", 1, least=1)
    averaging: Choice | None = _setting(
        "How replicas are kept together, as in dasgd:every=4,delay=1.", None
    )
    optimizer: Optimizer = _recipe("sgd, adam, adamw or muon (AdamW for what is no matrix).", "sgd")
    lr: float = _recipe("Learning rate at its peak.", 0.1)
    momentum: float = _recipe("Of sgd and muon.", 0.9)
    weight_decay: float = _recipe("Of every optimizer.", 0.0)
    decay: Decay = _recipe(
        "How the learning rate falls: constant, cosine, linear, step, one-cycle.", "cosine"
    )
    warmup: int = _recipe("Updates in which the learning rate rises.", 0, least=0)
    milestones: tuple[float, ...] = _recipe(
        "With step: shares of the run after which it falls to a tenth, as in 0.5,0.75.",
        (0.5, 0.75),
    )
    clip: float | None = _recipe("Bound on the gradient norm.", None)
    nonfinite: str | None = _setting(
        "About gradients that are not finite: warn, stop, skip or roll-back.", None
    )
    max_lag: int | None = _setting("Bound on the lag, in updates; refused and measured.", None)
    epochs: int = _recipe("Passes over the training data.", 5, least=1)
    max_steps: int | None = _recipe(
        "Stop after so many updates; the learning rate falls as for all --epochs.", None, least=1
    )
    batch_size: int = _recipe("Rows per update, over all replicas.", 64, least=1)
    drop_last: bool = _recipe("Leave out a short last batch.", False)
    augment: bool = _recipe("Random crops and flips where the data has them.", True)
    seed: int = _setting("Of weights, order, augmentation and dropout.", 0, study="--seeds")
    device: str = _machine("As in cpu or cuda.", "cpu")
    engine: str | None = _machine(
        "serial, processes or streams (side by side on one GPU); by default as started.", None
    )
    balance: str = _setting(
        "How --stages cuts: by counted arithmetic or by measured time.", "counted"
    )
    compile: bool = _setting("Every stage through torch.compile.", False)
    autocast: bool = _recipe("Forward passes in bfloat16 where PyTorch allows.", False)
    evaluate_every: int = _setting("Epochs between evaluations.", 1, least=1)
    save_every: int | None = _upkeep("Steps between checkpoints, for --resume.", None, least=1)
    keep: int = _upkeep("How many checkpoints stay on disk.", 3, least=1)
    model_file: ModelFile = _upkeep(
        "The final weights: safetensors, which everybody reads, or pt, by torch.save.",
        "safetensors",
    )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str = "") -> "Experiment":
        """From flags or a TOML table: names checked, texts turned into what a field holds."""
        known = {f.name: f for f in fields(cls)}
        given = {}
        for name, value in _by_field(values, where).items():
            if name not in known:
                raise unknown(f"setting{where}", name, sorted(known))
            if name == "method" and isinstance(value, str) and len(split_choices(value)) > 1:
                method, *rest = split_choices(value)
                raise ConfigurationError(
                    f"method {value!r}: corrections have a setting of their own. Give method"
                    f" {method} and correction {'+'.join(rest)}."
                )
            given[name] = _typed(known[name].type, value, name)
        return cls(**given)

    @classmethod
    def of_run(cls, config: Mapping[str, Any]) -> "Experiment":
        """What a stored run was asked for; it may be older than a setting."""
        return cls.read({f.name: config[f.name] for f in fields(cls) if f.name in config})

    @classmethod
    def from_toml(cls, path: str | Path) -> dict[str, Any]:
        """What a file says, by field, for :meth:`read`."""
        try:
            return _by_field(tomllib.loads(Path(path).read_text()), f" in {path}")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path} is not TOML: {error}.") from None

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata["least"]
            if None not in (value, least) and value < least:
                raise ConfigurationError(f"{each.name}={value}: give at least {least}.")
            if each.type is float and not abs(value) <= 3e38:
                raise ConfigurationError(
                    f"{each.name}={value}: give a number that float32 can hold, below 3e+38."
                )
            if get_origin(each.type) is Literal and value not in get_args(each.type):
                raise unknown(each.name, value, get_args(each.type))
        if not -(2**63) <= self.seed < 2**64:  # what torch.manual_seed takes
            raise ConfigurationError(
                f"seed={self.seed}: give a whole number of 64 bits, {-(2**63)} to {2**64 - 1}."
            )
        if not self.lr > 0:
            raise ConfigurationError(f"lr={self.lr}: give a number above 0.")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum={self.momentum}: give a number from 0 to below 1.")
        if not all(0 < share < 1 for share in self.milestones):
            raise ConfigurationError(
                f"milestones={spell(self.milestones)}: give shares of the run, above 0 and below 1."
            )
        if self.hybrid is not None and not 0 < self.hybrid < self.epochs:
            raise ConfigurationError(
                f"hybrid={self.hybrid} of epochs={self.epochs}: the method runs for the first of"
                " them and synchronous training for the rest, so give fewer than all."
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as stored with a run; :meth:`read` takes them back."""
        return asdict(self)

    def unlike(self, other: "Experiment", *roles: Role) -> list[str]:
        """The settings with these roles in which they differ, be one of them stored."""
        ours, theirs = (  # as they come back from JSON, where tuples are lists and keys are text
            json.loads(json.dumps(each.as_dict(), default=repr, skipkeys=True))
            for each in (self, other)
        )
        return [name for name in names_of(*roles) if ours[name] != theirs[name]]


def names_of(*roles: Role) -> tuple[str, ...]:
    """The settings that are part of these."""
    return tuple(f.name for f in fields(Experiment) if f.metadata["role"] in roles)


def _typed(kind: Any, value: Any, name: str) -> Any:
    """A value as its field holds it; text from the command line is read."""
    if isinstance(kind, UnionType):
        if value in (None, "none", "None"):
            return None
        kind, _ = get_args(kind)
    try:
        if kind is Choice:
            return Choice.read(value, name)
        if kind == tuple[Choice, ...]:
            several = [value] if isinstance(value, str | Mapping | Choice) else list(value)
            parts = [split_choices(each) if isinstance(each, str) else [each] for each in several]
            return tuple(Choice.read(part, name) for part in chain(*parts))
        if get_origin(kind) is tuple and not isinstance(value, Mapping):
            texts = value.split(",") if isinstance(value, str) else map(str, value)
            read, _ = get_args(kind)
            return tuple(read(text.strip()) for text in texts if text.strip())
        if kind is bool and isinstance(value, bool):
            return value
        if kind in (int, float):
            return kind(str(value))
        if get_origin(kind) is Literal or kind is str:
            return str(value)
    except ConfigurationError:
        raise
    except (ValueError, TypeError):
        pass
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    wanted = words.get(kind, "numbers separated by commas")
    raise ConfigurationError(f"{name}={value!r}: give {wanted}.")
