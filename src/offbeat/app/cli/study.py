"""``offbeat study``: what it varies, read from flags or a file, and the table it ends with."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from offbeat.app.cli.options import MOST_STAGES, read_count, with_flags
from offbeat.app.cli.printing import print_columns
from offbeat.app.cli.train import EXPERIMENT_FLAGS, ConfigOption, OutOption, given_settings
from offbeat.app.experiment import Experiment
from offbeat.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from offbeat.app.study import Cell

DEFAULT_METHODS = "stale-weights dsp adl:accumulate=4 pipedream"


class Asked(NamedTuple):
    base: Experiment
    """What all runs have in common."""
    methods: list[str]
    stages: list[int]
    seeds: int


def read_study(config: str | None, flags: dict[str, Any], own: dict[str, Any]) -> Asked:
    """``own``: the flags that a run has not."""
    given = given_settings(config, flags | own)
    methods = _listed(given.pop("methods", DEFAULT_METHODS))
    counts = _listed(given.pop("stage_counts", "2,4"), also=",")
    seeds = read_count("--seeds", str(given.pop("seeds", 3)))
    for name, option in ((f.name, f.metadata["study"]) for f in fields(Experiment)):
        if option and name in given:
            source = f"--{name}" if flags.get(name) is not None else f"{name} in {config}"
            raise ConfigurationError(
                f"{source} is for one run, and a study makes several: leave it out and give"
                f" {option}."
            )
    base = Experiment.read(given, "" if config is None else f" in {config}")
    for option, value, found in (
        ("--methods", "'dsp pipedream'", methods),
        ("--stage-counts", "2,4", counts),
    ):
        if not found:
            raise ConfigurationError(f"{option}: give at least one, as in {option} {value}.")
    stages = [read_count("--stage-counts", text, most=MOST_STAGES) for text in counts]
    return Asked(base, methods, stages, seeds)


def _listed(value: Any, also: str = " ") -> list[str]:
    """The parts of a text, or of a list of a TOML file; no blanks around the plus of one."""
    texts = value if isinstance(value, list) else [value]
    joined = (re.sub(r"\s*\+\s*", "+", str(text)).replace(also, " ") for text in texts)
    return [part for text in joined for part in text.split()]


def table_of(cells: Sequence["Cell"], percent: bool) -> list[list[str]]:
    """A row per configuration, accuracies in percent or losses, below their heading."""
    score = "accuracy, %" if percent else "loss"
    return [
        ["method", "stages", "lag", score, "std of seeds", "gap to BP"],
        *(
            [
                cell.method,
                str(cell.stages),
                " ".join(map(str, cell.lags)),
                f"{cell.mean * 100:.2f}" if percent else f"{-cell.mean:.4f}",
                _spread(cell, percent),
                # Not -gap: BP's own is 0, and -0.0 would be printed as such.
                f"{cell.gap * 100:+.2f}" if percent else f"{0 - cell.gap:+.4f}",
            ]
            for cell in cells
        ),
    ]


def _spread(cell: "Cell", percent: bool) -> str:
    if len(cell.scores) == 1:
        return "-"
    return f"{cell.spread * 100:.2f}" if percent else f"{cell.spread:.4f}"


@with_flags(EXPERIMENT_FLAGS)
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
    print_columns(table_of(cells, percent))
    try:
        from offbeat.app.report import draw_study

        path = folder / "study.png"
        draw_study(cells, percent).savefig(path, dpi=120)
        typer.echo(f"\nsaved {path}")
    except MissingExtra as error:
        typer.echo(f"\nno picture: {error}", err=True)
    if len(runs) < len(planned):  # interrupted
        sys.exit(130)
