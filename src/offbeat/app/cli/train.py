"""``offbeat train``: its flags are the fields of :class:`offbeat.app.experiment.Experiment`."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from offbeat.app.experiment import Experiment, names_of, plain
from offbeat.app.runs import Run
from offbeat.errors import ConfigurationError
from offbeat.registry import Choice, spell

ConfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A TOML file; flags given beside it win.")
]
OutOption = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Where the run is stored; runs/... by default.")
]
BoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard events into the folder.")
]


ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --out, from its newest checkpoint."),
]


def with_experiment_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one flag per field; they arrive in its ``**flags``, None where not given."""
    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    made = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(f.name, f.type, f.metadata["help"], f.default),
        )
        for f in fields(Experiment)
    ]
    command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *made]} | {"return": None}
    return command


def _annotation(name: str, kind: Any, help_: str, default: Any) -> Any:
    flag = "--" + name.replace("_", "-")
    shown = "" if default in (None, (), False, True) else f" [{spell(default)}]"
    if kind is bool:
        opposite = f"--no-{name.replace('_', '-')}"
        option = typer.Option(f"{flag}/{opposite}", help=help_, show_default=False)
        return Annotated[bool | None, option]
    several = kind == tuple[Choice, ...]
    metavar = {int: "N", float: "X"}.get(kind, "TEXT")
    if Choice in (kind, *get_args(kind)):
        metavar = "NAME[:SETTINGS]"
    option = typer.Option(flag, metavar=metavar, help=help_ + shown, show_default=False)
    return Annotated[list[str] | None if several else str | None, option]


def read_experiment(config: str | None, flags: dict[str, Any]) -> Experiment:
    """What the file says, overruled by the flags that were given."""
    where = "" if config is None else f" in {config}"
    return Experiment.read(given_settings(config, flags), where)


def given_settings(config: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {} if config is None else Experiment.from_toml(config)
    return values | {k: v for k, v in flags.items() if v is not None and v != []}


def stored_experiment(folder: Path, given: dict[str, Any]) -> Experiment:
    """What a stored run was asked to do; settings that are given again must be the same."""
    config = Run.load(folder).config
    names, free = [f.name for f in fields(Experiment)], names_of("upkeep")
    stored = Experiment.read({name: config[name] for name in names if name in config})
    asked = Experiment.read(given)
    before, after = plain(stored.as_dict()), plain(asked.as_dict())
    for name in given:
        then, now = getattr(stored, name), getattr(asked, name)
        if name not in free and before[name] != after[name]:
            raise ConfigurationError(
                f"{folder} was started with {name}={spell(then)}, and --resume goes on with the"
                f" same run: leave out {name}={spell(now)}, or start another one (--out)."
            )
    return replace(stored, **{name: getattr(asked, name) for name in given if name in free})


def folder_for(experiment: Experiment, out: str | None) -> Path:
    if out is not None:
        return Path(out)
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{experiment.model.name}-{experiment.method.name}-{moment}"
