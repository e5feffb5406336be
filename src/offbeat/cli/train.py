"""``offbeat train``: its flags are the fields of :class:`offbeat.experiment.Experiment`."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.experiment import Choice, Experiment

ConfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A TOML file; flags given beside it win.")
]
OutOption = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Where the run is stored; runs/... by default.")
]
BoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard events into the folder.")
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
            annotation=_annotation(f.name, f.type, dict(f.metadata), f.default),
        )
        for f in fields(Experiment)
    ]
    command.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *made]} | {"return": None}
    return command


def _annotation(name: str, kind: Any, words: dict[str, str], default: Any) -> Any:
    flag = "--" + name.replace("_", "-")
    shown = "" if default in (None, (), False, True) else f" [{_text(default)}]"
    if kind is bool:
        opposite = f"--no-{name.replace('_', '-')}"
        option = typer.Option(f"{flag}/{opposite}", help=words["help"], show_default=False)
        return Annotated[bool | None, option]
    several = kind == tuple[Choice, ...]
    metavar = words["metavar"] or {int: "N", float: "X"}.get(kind, "TEXT")
    option = typer.Option(flag, metavar=metavar, help=words["help"] + shown, show_default=False)
    return Annotated[list[str] | None if several else str | None, option]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_experiment(config: str | None, flags: dict[str, Any]) -> Experiment:
    """What the file says, overruled by the flags that were given."""
    values: dict[str, Any] = {} if config is None else Experiment.from_toml(config)
    where = "" if config is None else f" in {config}"
    values = {key.replace("-", "_"): value for key, value in values.items()}
    given = {k: v for k, v in flags.items() if v is not None and v != []}
    return Experiment.read(values | given, where)


def folder_for(experiment: Experiment, out: str | None) -> Path:
    if out is not None:
        return Path(out)
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{experiment.model.name}-{experiment.method.name}-{moment}"
