"""``offbeat timeline``: a method drawn in time, or a run as it was measured."""

from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from statistics import median
from typing import Any

import typer

from offbeat.app.cli import options
from offbeat.app.cli.printing import print_json
from offbeat.app.cli.schedule import heading
from offbeat.app.runs import LEDGER
from offbeat.errors import ConfigurationError
from offbeat.records.ledger import Ledger
from offbeat.schedules.timeline import Timeline, measured_timeline
from offbeat.schedules.timeline import timeline as timeline_of


@options.with_flags(options.SETTING_FLAGS)
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
    **settings: str | None,
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
        found = measured_timeline(Ledger.load(path / LEDGER if path.is_dir() else path))
        if as_json:
            print_json(_timed(found))
        else:  # from the middle of the run, where the pipe is full
            later = found.from_middle()
            shown = _readable(later, columns)
            typer.echo(later.picture(columns, shown=shown))
            typer.echo(f"{shown:.3g} s from {found.middle:.3g} s on, of {found.duration:.3g} s")
            typer.echo(_measures(found, " s"))
        return
    assert name is not None
    method = options.read_method(name, settings)
    costs = options.read_costs(
        share, forward=forward, recompute=recompute, backward=backward, hop=hop
    )
    steps = options.read_count("--batches", batches)
    count = options.read_count("--stages", stages, most=options.MOST_STAGES)
    found = timeline_of(method, count, steps=steps, costs=costs)
    if as_json:
        print_json(heading(method, count, steps) | {"costs": asdict(costs)} | _timed(found))
    else:
        typer.echo(_drawn(found, columns))


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
