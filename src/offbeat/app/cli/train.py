"""``offbeat train``: its flags are the fields of :class:`offbeat.app.experiment.Experiment`."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields, replace
from datetime import datetime
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from offbeat.app.experiment import Experiment, names_of
from offbeat.app.runs import CHECKPOINTS, CONFIG, Run
from offbeat.errors import ConfigurationError
from offbeat.registry import Choice, spell

_Command = TypeVar("_Command", bound=Callable[..., None])

ConfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A TOML file; flags given beside it win.")
]
OutOption = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Where the run is stored; runs/... by default.")
]
TensorBoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard events into the folder.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, from its newest checkpoint.")
]


def with_settings(command: _Command) -> _Command:
    """Gives a command an option per setting of an experiment; they arrive in its ``**flags``, None
    where not given."""
    own = [p for p in signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    every = [*own, *map(_option, fields(Experiment))]
    command.__signature__ = Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every} | {"return": None}
    return command


def _option(setting: Field[Any]) -> Parameter:
    flag, default = setting.name.replace("_", "-"), setting.default
    text: str = setting.metadata["help"]
    kind: Any = setting.type
    given: Any = bool
    if kind is bool:
        option = typer.Option(f"--{flag}/--no-{flag}", help=text, show_default=False)
    else:
        named = Choice in (kind, *get_args(kind))
        metavar = "NAME[:SETTINGS]" if named else {int: "N", float: "X"}.get(kind, "TEXT")
        text += "" if default in (None, (), False, True) else f" [{spell(default)}]"
        option = typer.Option(f"--{flag}", metavar=metavar, help=text, show_default=False)
        given = list[str] if kind == tuple[Choice, ...] else str
    annotation = Annotated[given | None, option]
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def given_settings(config: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """What the file says, overruled by the flags that were given."""
    values: dict[str, Any] = {} if config is None else Experiment.from_toml(config)
    return values | {k: v for k, v in flags.items() if v is not None and v != []}


def stored_experiment(folder: Path, given: dict[str, Any]) -> Experiment:
    """What a stored run was asked to do; settings that are given again must be the same."""
    stored, asked = Experiment.of_run(Run.load(folder).config), Experiment.read(given)
    for name in stored.unlike(asked, "recipe", "run", "machine"):
        if name in given:
            raise ConfigurationError(
                f"{folder} was started with {name}={spell(getattr(stored, name))}, and --resume"
                " goes on with the same run: leave out"
                f" {name}={spell(getattr(asked, name))}, or start another one (--out)."
            )
    free = [name for name in names_of("upkeep") if name in given]
    return replace(stored, **{name: getattr(asked, name) for name in free})


@with_settings
def train(
    config: ConfigOption = None,
    out: OutOption = None,
    tensorboard: TensorBoardOption = False,
    resume: ResumeOption = False,
    **flags: Any,
) -> None:
    """Train a network of the zoo by any method, alone or under torchrun, and store the run."""
    given = given_settings(config, flags)
    experiment = Experiment.read(given, "" if config is None else f" in {config}")
    if resume and out is None:
        raise ConfigurationError("--resume goes on with a stored run: give its folder with --out.")
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    usual = f"runs/{experiment.model.name}-{experiment.method.name}-{moment}"
    folder = Path(usual if out is None else out)
    first_process = os.environ.get("RANK", "0") == "0"
    if resume and not (folder / CONFIG).exists():
        if not given:
            raise ConfigurationError(
                f"{folder} holds no run to go on with: give the folder of one with --out, or the"
                " settings of a new one."
            )
        if first_process:
            typer.echo(f"no run in {folder}: starting one")
    if resume and (folder / CONFIG).exists():
        experiment = stored_experiment(folder, given)
        if Run.load(folder).summary.get("status") == "finished":
            typer.echo(f"{folder} is finished already")
            return
        if first_process and not (folder / CHECKPOINTS).exists():
            typer.echo(f"no checkpoint in {folder}: starting from step 0 (--save-every keeps some)")
    from rich.console import Console

    from offbeat.app.cli.live import Lines, Screen, TensorBoard
    from offbeat.app.progress import Watcher
    from offbeat.app.training import run_experiment

    console = Console()

    def watchers() -> list[Watcher]:
        shown: Watcher = Screen(console) if console.is_terminal else Lines(console)
        return [shown, TensorBoard(folder)] if tensorboard else [shown]

    summary = run_experiment(experiment, folder, watchers, resume=resume)
    if first_process:
        typer.echo(f"stored in {folder}")
        loss = summary["loss"]
        if loss is not None and not math.isfinite(loss):
            typer.echo(
                f"the test loss is {loss}: training has diverged. Try a smaller --lr;"
                " --nonfinite stop ends such a run where it happens.",
                err=True,
            )
    if summary["status"] == "interrupted":
        if first_process and (folder / CHECKPOINTS).exists():
            count = os.environ.get("WORLD_SIZE", "1")
            launcher = f"torchrun --nproc-per-node {count} -m -- " if count != "1" else ""
            typer.echo(f"to go on: {launcher}offbeat train --resume --out {folder}")
        sys.exit(130)
