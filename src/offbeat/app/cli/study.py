"""``offbeat study``: what it varies, read from flags or a file, and the table it ends with."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.app.cli.options import MOST_STAGES, Json, read_count
from offbeat.app.cli.printing import print_columns, print_json
from offbeat.app.cli.train import ConfigOption, OutOption, given_settings, with_settings
from offbeat.app.experiment import Experiment
from offbeat.app.study import Cell, cells_of, plan, run_study
from offbeat.errors import ConfigurationError, MissingExtra

DEFAULT_METHODS = "stale-weights dsp adl:accumulate=4 pipedream"


def read_study(
    config: str | None, flags: dict[str, Any], own: dict[str, Any]
) -> dict[str, Experiment]:
    """The runs of a study, by name. ``own``: the flags that a run has not."""
    given = given_settings(config, flags | own)
    methods = _split_list(given.pop("methods", DEFAULT_METHODS))
    counts = _split_list(given.pop("stage_counts", "2,4"), also=",")
    seeds = read_count("--seeds", str(given.pop("seeds", 3)))
    for name, option in ((f.name, f.metadata["study"]) for f in fields(Experiment)):
        if option and name in given:
            source = f"--{name}" if flags.get(name) is not None else f"{name} in {config}"
            raise ConfigurationError(
                f"{source} is for one run, and a study makes several: leave it out and give"
                f" {option}."
            )
    base = Experiment.read(given, "" if config is None else f" in {config}")
    if not methods:
        raise ConfigurationError("--methods: give at least one, as in --methods 'dsp pipedream'.")
    if not counts:
        raise ConfigurationError("--stage-counts: give at least one, as in --stage-counts 2,4.")
    stages = [read_count("--stage-counts", text, most=MOST_STAGES) for text in counts]
    return plan(base, methods, stages, seeds)


def _split_list(value: Any, also: str = " ") -> list[str]:
    """The parts of a text, or of a list of a TOML file; no blanks around the plus of one."""
    texts = value if isinstance(value, list) else [value]
    whole = " ".join(re.sub(r"\s*\+\s*", "+", str(text)) for text in texts)
    return whole.replace(also, " ").split()


def table_of(cells: Sequence[Cell], percent: bool) -> list[list[str]]:
    """A row per configuration, accuracies in percent or losses, below their heading."""
    # A loss is stored as a score, negative. Not -gap: BP's own is 0, and -0.0 would be printed.
    scale, digits, score = (100.0, 2, "accuracy, %") if percent else (1.0, 4, "loss")
    rows = [
        [
            cell.method,
            str(cell.stages),
            " ".join(map(str, cell.lags)),
            f"{scale * (cell.mean if percent else -cell.mean):.{digits}f}",
            "-" if len(cell.scores) == 1 else f"{scale * cell.spread:.{digits}f}",
            f"{scale * (cell.gap if percent else 0 - cell.gap):+.{digits}f}",
        ]
        for cell in cells
    ]
    return [["method", "stages", "lag", score, "std of seeds", "gap to BP"], *rows]


_SCORE = {True: "accuracy", False: "minus the test loss"}


def _plain(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    own = [{"mean": c.mean, "spread": c.spread, "gap": c.gap} for c in cells]
    return [asdict(cell) | more for cell, more in zip(cells, own, strict=True)]


@with_settings
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
    as_json: Json = False,
    **flags: Any,
) -> None:
    """How much staleness can this model take? Methods x stages x seeds, compared with BP."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            f"a study runs in one process, and torchrun has started {os.environ['WORLD_SIZE']}:"
            " start it without torchrun."
        )
    own = {"methods": methods, "stage_counts": stage_counts, "seeds": seeds}
    planned = read_study(config, flags, own)
    first = next(iter(planned.values()))
    folder = Path(out or f"studies/{first.model.name}-{first.data.name}")
    runs = run_study(planned, folder, lambda text: typer.echo(text, err=as_json))
    if not runs:
        sys.exit(130)
    cells = cells_of(runs)
    percent = runs[0].summary["accuracy"] is not None
    if as_json:
        print_json({"folder": str(folder), "score": _SCORE[percent], "cells": _plain(cells)})
    else:
        print_columns(table_of(cells, percent))
    try:
        from offbeat.app.report import draw_study

        path = folder / "study.png"
        draw_study(cells, percent).savefig(path, dpi=120)
        typer.echo(f"\nsaved {path}", err=as_json)
    except MissingExtra as error:
        typer.echo(f"\nno picture: {error}", err=True)
    if len(runs) < len(planned):  # interrupted
        sys.exit(130)
