"""``offbeat train``: its flags are the fields of :class:`offbeat.app.experiment.Experiment`."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import Field, fields, replace
from datetime import datetime
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from offbeat.app.cli.options import Json
from offbeat.app.cli.printing import print_json
from offbeat.app.experiment import PARTS, Experiment, names_of
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
LoggerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        metavar="MODULE:CLASS",
        help="Also give all numbers to a logger of yours, as in tracking:WandB.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, from its newest checkpoint.")
]


def with_settings(command: _Command) -> _Command:
    """Gives a command an option per setting of an experiment; they arrive in its ``**flags``, None
    where not given."""
    own = [p for p in signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    heading, options = "", []
    for setting in fields(Experiment):
        heading = PARTS.get(setting.name, heading)
        options.append(_option(setting, heading))
    every = [*own, *options]
    command.__signature__ = Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in every} | {"return": None}
    return command


def _option(setting: Field[Any], heading: str) -> Parameter:
    flag, default = setting.name.replace("_", "-"), setting.default
    text: str = setting.metadata["help"]
    kind: Any = setting.type
    given: Any = bool
    if kind is bool:
        option = typer.Option(
            f"--{flag}/--no-{flag}", help=text, show_default=False, rich_help_panel=heading
        )
    else:
        named = Choice in (kind, *get_args(kind))
        metavar = "NAME[:SETTINGS]" if named else {int: "N", float: "X"}.get(kind, "TEXT")
        text += "" if default in (None, (), False, True) else f" [{spell(default)}]"
        option = typer.Option(
            f"--{flag}", metavar=metavar, help=text, show_default=False, rich_help_panel=heading
        )
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
    logger: LoggerOption = None,
    resume: ResumeOption = False,
    as_json: Json = False,
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
    # With --json what is said on the way stands beside the answer, not in it.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        summary = _finished(folder, given) if resume else None
        if summary is None:
            if resume and (folder / CONFIG).exists():
                experiment = stored_experiment(folder, given)
            summary = _carry_out(experiment, folder, tensorboard, logger or [], resume)
    if as_json and _is_first():
        print_json({"folder": str(folder), **summary})
    if summary["status"] == "interrupted":
        sys.exit(130)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _finished(folder: Path, given: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of a run that has no more to do; says where one begins that is to go on."""
    if not (folder / CONFIG).exists():
        if not given:
            raise ConfigurationError(
                f"{folder} holds no run to go on with: give the folder of one with --out, or the"
                " settings of a new one."
            )
        if _is_first():
            typer.echo(f"no run in {folder}: starting one")
        return None
    stored_experiment(folder, given)
    summary = Run.load(folder).summary
    if summary.get("status") == "finished":
        typer.echo(f"{folder} is finished already")
        return summary
    if _is_first() and not (folder / CHECKPOINTS).exists():
        typer.echo(f"no checkpoint in {folder}: starting from step 0 (--save-every keeps some)")
    return None


def _carry_out(
    experiment: Experiment, folder: Path, tensorboard: bool, loggers: Sequence[str], resume: bool
) -> dict[str, Any]:
    from rich.console import Console

    from offbeat.app.cli.live import Lines, Screen
    from offbeat.app.loggers import Logger, Logging, TensorBoard, logger_named
    from offbeat.app.progress import Watcher
    from offbeat.app.training import run_experiment

    console = Console(file=sys.stdout)

    def watchers() -> list[Watcher]:
        shown: Watcher = Screen(console) if console.is_terminal else Lines(console)
        # Made before the first step: what is missing is said at once.
        made: list[Logger] = [TensorBoard(folder)] if tensorboard else []
        made += [logger_named(text) for text in loggers]
        return [shown, *(Logging(each, experiment) for each in made)]

    summary = run_experiment(experiment, folder, watchers, resume=resume)
    if not _is_first():
        return summary
    typer.echo(f"stored in {folder}")
    loss = summary["loss"]
    if loss is not None and not math.isfinite(loss):
        typer.echo(
            f"the test loss is {loss}: training has diverged. Try a smaller --lr;"
            " --nonfinite stop ends such a run where it happens.",
            err=True,
        )
    if summary["status"] == "interrupted" and (folder / CHECKPOINTS).exists():
        count = os.environ.get("WORLD_SIZE", "1")
        launcher = f"torchrun --nproc-per-node {count} -m -- " if count != "1" else ""
        typer.echo(f"to go on: {launcher}offbeat train --resume --out {folder}")
    return summary
