"""The command line: methods, corrections, schedule, timeline, train, study, report.

Only a command that trains or lists corrections may import torch, and only when it runs, so that
every other answer, help included, is there at once.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from shutil import get_terminal_size
from statistics import median
from typing import Annotated, Any

import typer

from offbeat import __version__
from offbeat.app.cli.options import (
    MOST_STAGES,
    AccumulateOption,
    BackwardOption,
    BatchesOption,
    BetaOption,
    CapOption,
    ForwardOption,
    HopOption,
    HopsOption,
    JsonOption,
    LagOption,
    MeasuredOption,
    MicroBatchesOption,
    NameArgument,
    OptionalNameArgument,
    RecomputeOption,
    RuleOption,
    ShareOption,
    StagesOption,
    WidthOption,
    read_costs,
    read_count,
    read_method,
)
from offbeat.app.cli.study import DEFAULT_METHODS, read_study, table_of
from offbeat.app.cli.train import (
    BoardOption,
    ConfigOption,
    OutOption,
    ResumeOption,
    folder_for,
    given_settings,
    read_experiment,
    stored_experiment,
    with_experiment_flags,
)
from offbeat.app.runs import CHECKPOINTS, CONFIG, LEDGER, Run
from offbeat.errors import ConfigurationError, MissingExtra, OffbeatError
from offbeat.methods import METHODS, Method
from offbeat.records.ledger import Ledger
from offbeat.schedules.timeline import Timeline, measured_timeline
from offbeat.schedules.timeline import timeline as timeline_of

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Asynchronous training for PyTorch: which stage does what, when, and how late."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one message on stderr and exit code 2."""
    shown, warnings.formatwarning = warnings.formatwarning, _in_one_line
    try:
        app(args=argv, prog_name="offbeat")
    except OffbeatError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)
    finally:
        warnings.formatwarning = shown


def _in_one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning without the place in this library that gives it."""
    return f"Warning: {message}\n"


# Commands


@app.command()
def methods(as_json: JsonOption = False) -> None:
    """List the methods: lag, memory, locks, paper."""
    rows = [_described(kind()) for kind in METHODS]
    if as_json:
        _print_json(rows)
        return
    keys = [key for key in rows[0] if key != "settings"]
    head = ["name", "lag", "copies", "backward", "waits for", "reference"]
    _print_columns([head, *([row[key] or "-" for key in keys] for row in rows)])
    typer.echo(
        "\nlag: updates between a batch's forward and the application of its gradient, at"
        "\nstage k = 0 ... K-1 of K; M micro-batches per update divide it by M, rounded up."
        "\ncopies: of the weights, per stage. backward: the weights it sees, by default."
    )


@app.command()
def corrections(as_json: JsonOption = False) -> None:
    """List the corrections: what each changes, its settings, memory, paper."""
    from offbeat.corrections import CORRECTIONS

    rows = [
        {
            "name": kind.name,
            "acts_on": kind.acts_on,
            "settings": {f.name: f.default for f in fields(kind)},
            "weight_copies": kind.memory,
            "reference": kind.reference,
        }
        for kind in CORRECTIONS
    ]
    if as_json:
        _print_json(rows)
        return
    head = ["name", "acts on", "settings", "copies", "reference"]
    body = [
        [
            str(row["name"]),
            str(row["acts_on"]),
            ",".join(f"{f.name}={f.default}" for f in fields(kind)) or "-",
            str(row["weight_copies"]),
            str(row["reference"]),
        ]
        for kind, row in zip(CORRECTIONS, rows, strict=True)
    ]
    _print_columns([head, *body])
    typer.echo(
        "\ncopies: further ones of a stage's weights, D being its lag. A stage without lag is left"
        "\nalone by all of them. As in: offbeat train --correction predict:horizon=lag"
    )


@app.command()
def schedule(
    name: NameArgument,
    stages: StagesOption = "4",
    batches: BatchesOption = "8",
    accumulate: AccumulateOption = None,
    micro_batches: MicroBatchesOption = None,
    backward_rule: RuleOption = None,
    beta: BetaOption = None,
    lag: LagOption = None,
    hops: HopsOption = None,
    cap: CapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a method's order of work, and its lags."""
    method = read_method(name, accumulate, micro_batches, backward_rule, beta, lag, hops, cap)
    steps = read_count("--batches", batches)
    plan = method.schedule(read_count("--stages", stages, most=MOST_STAGES))
    table = plan.table(steps)
    if as_json:
        facts = {
            "lags": plan.lags,
            "lockstep": plan.lockstep,
            "local_losses": plan.local_losses,
            "schedule": str(plan),
            "table": [[[str(a) for a in row] for row in of_stage] for of_stage in table.rows],
        }
        _print_json(_heading(method, plan.stages, steps) | facts)
        return
    lines = [table.grid(), "", str(plan), "", f"lag per stage: {' '.join(map(str, plan.lags))}"]
    if plan.micro_batches > 1:
        lines.append(f"micro-batches per batch: {plan.micro_batches}")
    typer.echo("\n".join(lines))


@app.command()
def timeline(
    context: typer.Context,
    name: OptionalNameArgument = None,
    measured: MeasuredOption = None,
    stages: StagesOption = "4",
    batches: BatchesOption = "8",
    forward: ForwardOption = "1",
    recompute: RecomputeOption = "1",
    backward: BackwardOption = "2",
    hop: HopOption = "0",
    share: ShareOption = None,
    width: WidthOption = None,
    accumulate: AccumulateOption = None,
    micro_batches: MicroBatchesOption = None,
    backward_rule: RuleOption = None,
    beta: BetaOption = None,
    lag: LagOption = None,
    hops: HopsOption = None,
    cap: CapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a method in time, or a run that was measured, with busy share and speed-up."""
    columns = get_terminal_size((100, 24)).columns
    if width is not None:
        columns = read_count("--width", width, least=20)
    if (name is None) == (measured is None):
        raise ConfigurationError("give either a METHOD or --measured FILE, the ledger of a run.")
    if measured is not None:
        _refuse_given(context, but=("measured", "width", "as_json"))
        path = Path(measured)
        found = measured_timeline(Ledger.load(path / LEDGER if path.is_dir() else path))
        if as_json:
            _print_json(_timed(found))
        else:  # from the middle of the run, where the pipe is full
            later = found.from_middle()
            shown = _readable(later, columns)
            typer.echo(later.picture(columns, shown=shown))
            typer.echo(f"{shown:.3g} s from {found.middle:.3g} s on, of {found.duration:.3g} s")
            typer.echo(_measures(found, " s"))
        return
    assert name is not None
    method = read_method(name, accumulate, micro_batches, backward_rule, beta, lag, hops, cap)
    costs = read_costs(share, forward=forward, recompute=recompute, backward=backward, hop=hop)
    steps = read_count("--batches", batches)
    count = read_count("--stages", stages, most=MOST_STAGES)
    found = timeline_of(method, count, steps=steps, costs=costs)
    if as_json:
        _print_json(_heading(method, count, steps) | {"costs": asdict(costs)} | _timed(found))
    else:
        typer.echo(_drawn(found, columns))


@app.command()
@with_experiment_flags
def train(
    config: ConfigOption = None,
    out: OutOption = None,
    tensorboard: BoardOption = False,
    resume: ResumeOption = False,
    **flags: Any,
) -> None:
    """Train a network of the zoo by any method, alone or under torchrun, and store the run."""
    experiment = read_experiment(config, flags)
    if resume and out is None:
        raise ConfigurationError("--resume goes on with a stored run: give its folder with --out.")
    folder = folder_for(experiment, out)
    first_process = os.environ.get("RANK", "0") == "0"
    if resume and not (folder / CONFIG).exists():
        if not given_settings(config, flags):
            raise ConfigurationError(
                f"{folder} holds no run to go on with: give the folder of one with --out, or the"
                " settings of a new one."
            )
        if first_process:
            typer.echo(f"no run in {folder}: starting one")
    if resume and (folder / CONFIG).exists():
        experiment = stored_experiment(folder, given_settings(config, flags))
        if Run.load(folder).summary.get("status") == "finished":
            typer.echo(f"{folder} is finished already")
            return
        if first_process and not (folder / CHECKPOINTS).exists():
            typer.echo(f"no checkpoint in {folder}: starting from step 0 (--save-every keeps some)")
    from rich.console import Console

    from offbeat.app.cli.live import Lines, Screen
    from offbeat.app.cli.tensorboard import Board
    from offbeat.app.training import Watcher, run_experiment

    console = Console()

    def watchers() -> list[Watcher]:
        shown: Watcher = Screen(console) if console.is_terminal else Lines(console)
        return [shown, Board(folder)] if tensorboard else [shown]

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


@app.command()
@with_experiment_flags
def study(
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Methods, separated by spaces, with corrections behind a +, as in"
            f" 'pipedream pipedream+spike-compensation' [{DEFAULT_METHODS}].",
        ),
    ] = None,
    stage_counts: Annotated[
        str | None, typer.Option("--stage-counts", metavar="2,4", help="Numbers of stages [2,4].")
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="N", help="Seeds 0, 1, ... [3].")] = None,
    config: ConfigOption = None,
    out: OutOption = None,
    **flags: Any,
) -> None:
    """How much staleness can this model take? Methods x stages x seeds, compared with BP."""
    from offbeat.app.study import cells_of, plan, run_study

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            f"a study runs in one process, and torchrun has started {os.environ['WORLD_SIZE']}:"
            " start it without torchrun."
        )
    own = {"methods": methods, "stage_counts": stage_counts, "seeds": seeds}
    asked = read_study(config, flags, own)
    experiment = asked.base
    folder = Path(out or f"studies/{experiment.model.name}-{experiment.data.name}")
    planned = plan(experiment, asked.methods, asked.stages, asked.seeds)
    runs = run_study(planned, folder, typer.echo)
    if not runs:
        sys.exit(130)
    cells = cells_of(runs)
    percent = runs[0].summary["accuracy"] is not None
    _print_columns(table_of(cells, percent))
    try:
        from offbeat.app.report import draw_study

        path = folder / "study.png"
        draw_study(cells, percent).savefig(path, dpi=120)
        typer.echo(f"\nsaved {path}")
    except MissingExtra as error:
        typer.echo(f"\nno picture: {error}", err=True)
    if len(runs) < len(planned):  # interrupted
        sys.exit(130)


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of stored runs, or of a study.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where to write; RUN/report by default.")
    ] = None,
) -> None:
    """Write one page that explains what staleness did, with every figure and a trace."""
    from offbeat.app.report import write_report

    found = [Run.load(folder) for given in runs for folder in _runs_in(Path(given))]
    folder = Path(out) if out is not None else Path(runs[0]) / "report"
    try:
        written = write_report(found, folder)
    except MissingExtra as error:
        typer.echo(f"page written, but no pictures: {error}", err=True)
        written = [folder / "report.html"]
    typer.echo(f"wrote {next(path for path in written if path.name == 'report.html')}")


def _runs_in(folder: Path) -> list[Path]:
    """The run itself, or those of a study."""
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    return [folder] if (folder / CONFIG).exists() or not inside else inside


# Printing


def _described(method: Method) -> dict[str, Any]:
    settings = _settings(method)
    return {
        "name": method.name,
        "lag": method.lag_formula,
        "weight_copies": method.copies,
        "backward": settings.get("backward"),
        "waits_for": method.waits_for,
        "reference": method.reference,
        "settings": settings,
    }


def _settings(method: Method) -> dict[str, Any]:
    return {field.name: getattr(method, field.name) for field in fields(method)}


def _heading(method: Method, stages: int, batches: int) -> dict[str, Any]:
    return {
        "method": method.name,
        "settings": _settings(method),
        "stages": stages,
        "batches": batches,
        "micro_batches": method.schedule(stages).micro_batches,
    }


def _timed(found: Timeline) -> dict[str, Any]:
    return {
        "time_per_batch": found.step_time,
        "busy_share": found.busy_share,
        "speed_up": found.speed_up,
        "duration": found.duration,
        "spans": [{"action": str(s.action), "start": s.start, "end": s.end} for s in found.spans],
    }


def _drawn(found: Timeline, columns: int) -> str:
    lines = [found.picture(columns)]
    # Drawn again wider, because a cut that falls on blanks leaves no trace.
    if lines[0] != found.picture(50 * columns):
        lines.append(f"... cut at {columns} columns; --width {2 * columns} shows more")
    return "\n".join([*lines, _measures(found)])


def _readable(found: Timeline, columns: int) -> float:
    """As much time as a picture has room for: three steps, fewer if they have many parts."""
    lengths = [s.end - s.start for s in found.spans if s.action.kind != "U"]
    typical = median(lengths) if lengths else found.step_time
    return min(3 * found.step_time, typical * columns / _LETTERS)


_LETTERS = 6
"""Room for the name of a typical action in a measured timeline."""


def _refuse_given(context: typer.Context, but: tuple[str, ...]) -> None:
    """An option that would do nothing here is a mistake, and is said to be one."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in but and source is not None and source.name == "COMMANDLINE":
            raise ConfigurationError(
                f"{option.opts[0]} is about the model of a method, and --measured draws what has"
                " happened: leave one of them out."
            )


def _measures(found: Timeline, unit: str = "") -> str:
    lines = [
        "",
        f"time per batch  {found.step_time:.6g}{unit}",
        f"busy share      {found.busy_share:.1%}",
        f"speed-up        {found.speed_up:.2f} over one device",
    ]
    return "\n".join(lines)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_columns(rows: list[list[str]]) -> None:
    """Aligned columns; on a terminal rich folds the cells that do not fit."""
    if sys.stdout and sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False)
        for place, title in enumerate(rows[0]):
            grid.add_column(title, no_wrap=place < 4, overflow="fold")
        for row in rows[1:]:
            grid.add_row(*row)
        Console(highlight=False).print(grid)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        typer.echo("  ".join(cells).rstrip())
