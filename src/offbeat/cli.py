"""The command line: ``offbeat methods``, ``offbeat schedule``, ``offbeat timeline``.

Numbers arrive as text and are read here: typer's message for a bad number leaves out the number.
None of these commands may import torch, so that every answer is there at once.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from math import isfinite
from shutil import get_terminal_size
from typing import Annotated, Any, TypeVar

import typer

from offbeat.errors import ConfigurationError, OffbeatError
from offbeat.methods import METHODS, Method, method_named
from offbeat.timeline import Costs, Timeline
from offbeat.timeline import timeline as timeline_of

_T = TypeVar("_T")

# Beyond these a table outgrows the memory before it outgrows the reader.
_MOST_STAGES = 256
_MOST = 10_000

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous training for PyTorch: which stage does what, when, and how late.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a user's mistake ends in one message on stderr and exit code 2."""
    try:
        app(args=argv, prog_name="offbeat")
    except OffbeatError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


# Options. The costs of `timeline` own the names --backward and --hop, so the settings of these
# names are --backward-rule and --hops, on both commands.


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


_Name = Annotated[
    str, typer.Argument(metavar="METHOD", help="A name from 'offbeat methods', case ignored.")
]
_Stages = Annotated[str, _option("K", "Number of stages.")]
_Batches = Annotated[str, _option("N", "Number of batches; each is one step.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_Forward = Annotated[str, _option("T", "Cost of a batch's forward at one stage.")]
_Recompute = Annotated[str, _option("T", "Cost of computing a forward again.")]
_Backward = Annotated[str, _option("T", "Cost of a batch's backward at one stage.")]
_Hop = Annotated[str, _option("T", "Cost of one message between neighbours.")]
_Share = Annotated[str | None, _option("2,1,1,1", "Weight of each stage; the total cost stays.")]
_Width = Annotated[str | None, _option("COLUMNS", "Width of the picture, if not the terminal's.")]

_Accumulate = Annotated[str | None, _option("M", "Setting: micro-batches per update.")]
_MicroBatches = Annotated[str | None, _option("M", "Setting: the same for gpipe and 1f1b.")]
_Rule = Annotated[
    str | None,
    _option("RULE", "Setting: a backward's weights: stash, current, recompute.", "--backward-rule"),
]
_Beta = Annotated[str | None, _option("X", "Setting of fdg: factor on a gradient per hop.")]
_Lag = Annotated[str | None, _option("4,2,0", "Setting of dsp: lag of each stage.")]
_Hops = Annotated[str | None, _option("1,1", "Setting of dsp: ticks per hop, one for all or K-1.")]


# Reading what the user typed. A parser raises ValueError for what breaks its rule.


def _read(option: str, text: str, parse: Callable[[str], _T], rule: str) -> _T:
    try:
        return parse(text)
    except ValueError:
        raise ConfigurationError(f"{option} {text!r}: give {rule}.") from None


def _whole(text: str, least: int = 0, most: int = _MOST) -> int:
    value = int(text)
    if not least <= value <= most:
        raise ValueError
    return value


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(map(_whole, text.split(",")))


def _whole_or_wholes(text: str) -> int | tuple[int, ...]:
    return _wholes(text) if "," in text else _whole(text)


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(_number, text.split(",")))


def _count(option: str, text: str, least: int = 1, most: int = _MOST) -> int:
    parse = partial(_whole, least=least, most=most)
    return _read(option, text, parse, f"a whole number from {least} to {most}")


_AT_LEAST_1 = (partial(_whole, least=1), f"a whole number from 1 to {_MOST}")
_SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "accumulate": ("--accumulate", *_AT_LEAST_1),
    "micro_batches": ("--micro-batches", *_AT_LEAST_1),
    "backward": ("--backward-rule", str.lower, "a rule"),
    "beta": ("--beta", _number, "a number, as in --beta 0.5"),
    "lag": ("--lag", _wholes, f"a whole number from 0 to {_MOST} per stage, as in --lag 4,2,0"),
    "hop": (
        "--hops",
        _whole_or_wholes,
        f"a whole number from 0 to {_MOST}, or one per hop, as in --hops 1,1",
    ),
}


def _method(name: str, *texts: str | None) -> Method:
    """The method with the settings the user gave, ``texts`` in the order of ``_SETTINGS``.

    A setting it lacks is refused here, because the library's message would list ``hop`` and
    ``backward``, and as options of ``timeline`` these are costs.
    """
    kind = type(method_named(name))
    takes = {field.name for field in fields(kind)}
    settings = {}
    for (setting, (option, parse, rule)), text in zip(_SETTINGS.items(), texts, strict=True):
        if text is None:
            continue
        if setting not in takes:
            known = [_SETTINGS[each][0] for each in _SETTINGS if each in takes]
            has = f"it takes {', '.join(known)}" if known else "it takes no settings"
            raise ConfigurationError(f"{kind.name} has no setting {option}: {has}.")
        settings[setting] = _read(option, text, parse, rule)
    return method_named(name, **settings)


def _costs(share: str | None, **texts: str) -> Costs:
    more = {"backward": "; which weights it sees is --backward-rule"}
    numbers = {
        name: _read(f"--{name}", text, _number, f"a number, as in --{name} 2{more.get(name, '')}")
        for name, text in texts.items()
    }
    rule = "a number per stage, as in --share 2,1,1,1"
    return Costs(**numbers, share=() if share is None else _read("--share", share, _numbers, rule))


# Commands


@app.command()
def methods(as_json: _Json = False) -> None:
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
def schedule(
    name: _Name,
    stages: _Stages = "4",
    batches: _Batches = "8",
    accumulate: _Accumulate = None,
    micro_batches: _MicroBatches = None,
    backward_rule: _Rule = None,
    beta: _Beta = None,
    lag: _Lag = None,
    hops: _Hops = None,
    as_json: _Json = False,
) -> None:
    """Print a method's order of work, and its lags."""
    method = _method(name, accumulate, micro_batches, backward_rule, beta, lag, hops)
    steps = _count("--batches", batches)
    plan = method.schedule(_count("--stages", stages, most=_MOST_STAGES))
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
    name: _Name,
    stages: _Stages = "4",
    batches: _Batches = "8",
    forward: _Forward = "1",
    recompute: _Recompute = "1",
    backward: _Backward = "2",
    hop: _Hop = "0",
    share: _Share = None,
    width: _Width = None,
    accumulate: _Accumulate = None,
    micro_batches: _MicroBatches = None,
    backward_rule: _Rule = None,
    beta: _Beta = None,
    lag: _Lag = None,
    hops: _Hops = None,
    as_json: _Json = False,
) -> None:
    """Draw a method in time, with busy share and speed-up."""
    method = _method(name, accumulate, micro_batches, backward_rule, beta, lag, hops)
    costs = _costs(share, forward=forward, recompute=recompute, backward=backward, hop=hop)
    steps = _count("--batches", batches)
    count = _count("--stages", stages, most=_MOST_STAGES)
    columns = get_terminal_size((100, 24)).columns
    if width is not None:
        columns = _count("--width", width, least=20)
    found = timeline_of(method, count, steps=steps, costs=costs)
    if as_json:
        _print_json(_heading(method, count, steps) | _timed(found, costs))
    else:
        typer.echo(_drawn(found, columns))


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


def _timed(found: Timeline, costs: Costs) -> dict[str, Any]:
    return {
        "costs": asdict(costs),
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
    lines += [
        "",
        f"time per batch  {found.step_time:.6g}",
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
