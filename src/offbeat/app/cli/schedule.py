"""``offbeat schedule`` and ``offbeat timeline``: a method's order of work, and its time."""

from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from statistics import median
from typing import Any

import typer

from offbeat.app.cli import options
from offbeat.app.cli.printing import print_json
from offbeat.app.runs import LEDGER
from offbeat.errors import ConfigurationError
from offbeat.methods import Method
from offbeat.records.ledger import Ledger
from offbeat.schedules.timeline import Timeline, measured_timeline
from offbeat.schedules.timeline import timeline as timeline_of


def schedule(
    name: options.MethodText,
    stages: options.Stages = "4",
    batches: options.Batches = "8",
    as_json: options.Json = False,
) -> None:
    """Print a method's order of work, and its lags."""
    method = options.read_method(name)
    steps = options.read_count("--batches", batches)
    plan = method.schedule(options.read_count("--stages", stages, most=options.MOST_STAGES))
    table = plan.table(steps)
    if as_json:
        facts = {
            "lags": plan.lags,
            "lockstep": plan.lockstep,
            "local_losses": plan.local_losses,
            "schedule": str(plan),
            "table": [[[str(a) for a in row] for row in of_stage] for of_stage in table.rows],
        }
        print_json(_heading(method, plan.stages, steps) | facts)
        return
    lines = [table.grid(), "", str(plan), "", f"lag per stage: {' '.join(map(str, plan.lags))}"]
    if plan.micro_batches > 1:
        lines.append(f"micro-batches per batch: {plan.micro_batches}")
    typer.echo("\n".join(lines))


def _heading(method: Method, stages: int, batches: int) -> dict[str, Any]:
    return {
        "method": method.name,
        "settings": asdict(method),
        "stages": stages,
        "batches": batches,
        "micro_batches": method.schedule(stages).micro_batches,
    }


def timeline(
    context: typer.Context,
    name: options.OptionalMethodText = None,
    measured: options.Measured = None,
    stages: options.Stages = "4",
    batches: options.Batches = "8",
    forward: options.Forward = "1",
    recompute: options.Recompute = "1",
    backward: options.Backward = "2",
    hop: options.Hop = "0",
    share: options.Share = None,
    width: options.Width = None,
    as_json: options.Json = False,
) -> None:
    """Draw a method in time, or a run that was measured, with busy share and speed-up."""
    columns = get_terminal_size((100, 24)).columns
    if width is not None:
        columns = options.read_count("--width", width, least=20)
    if (name is None) == (measured is None):
        raise ConfigurationError("give either a METHOD or --measured FILE, the ledger of a run.")
    if measured is not None:
        _refuse_given(context, but=("measured", "width", "as_json"))
        path = Path(measured)
        drawn = measured_timeline(Ledger.load(path / LEDGER if path.is_dir() else path))
        if as_json:
            print_json(_times_of(drawn))
        else:  # from the middle of the run, where the pipe is full
            later = drawn.from_middle()
            shown = _readable(later, columns)
            typer.echo(later.picture(columns, shown=shown))
            typer.echo(f"{shown:.3g} s from {drawn.middle:.3g} s on, of {drawn.duration:.3g} s")
            typer.echo(_measures(drawn, " s"))
        return
    assert name is not None
    method = options.read_method(name)
    costs = options.read_costs(
        share, forward=forward, recompute=recompute, backward=backward, hop=hop
    )
    steps = options.read_count("--batches", batches)
    count = options.read_count("--stages", stages, most=options.MOST_STAGES)
    drawn = timeline_of(method, count, steps=steps, costs=costs)
    if as_json:
        print_json(_heading(method, count, steps) | {"costs": asdict(costs)} | _times_of(drawn))
    else:
        picture = drawn.picture(columns)
        # Drawn again wider, because a cut that falls on blanks leaves no trace.
        if picture != drawn.picture(50 * columns):
            picture += f"\n... cut at {columns} columns; --width {2 * columns} shows more"
        typer.echo(f"{picture}\n{_measures(drawn)}")


def _times_of(drawn: Timeline) -> dict[str, Any]:
    return {
        "time_per_batch": drawn.step_time,
        "busy_share": drawn.busy_share,
        "speed_up": drawn.speed_up,
        "duration": drawn.duration,
        "spans": [{"action": str(s.action), "start": s.start, "end": s.end} for s in drawn.spans],
    }


def _readable(drawn: Timeline, columns: int) -> float:
    """As much time as a picture has room for: three steps, fewer if they have many parts."""
    lengths = [s.end - s.start for s in drawn.spans if s.action.kind != "U"]
    typical = median(lengths) if lengths else drawn.step_time
    return min(3 * drawn.step_time, typical * columns / 6)  # letters, for its name


def _refuse_given(context: typer.Context, but: tuple[str, ...]) -> None:
    """An option that would do nothing here is a mistake, and is said to be one."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in but and source is not None and source.name == "COMMANDLINE":
            raise ConfigurationError(
                f"{option.opts[0]} is about the model of a method, and --measured draws what has"
                " happened: leave one of them out."
            )


def _measures(drawn: Timeline, unit: str = "") -> str:
    return (
        f"\ntime per batch  {drawn.step_time:.6g}{unit}\n"
        f"busy share      {drawn.busy_share:.1%}\n"
        f"speed-up        {drawn.speed_up:.2f} over one device"
    )
