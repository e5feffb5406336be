"""``offbeat schedule``: a method's order of work."""

from dataclasses import asdict
from typing import Any

import typer

from offbeat.app.cli import options
from offbeat.app.cli.printing import print_json
from offbeat.methods import Method


@options.with_flags(options.SETTING_FLAGS)
def schedule(
    name: options.MethodText,
    stages: options.Stages = "4",
    batches: options.Batches = "8",
    as_json: options.Json = False,
    **settings: str | None,
) -> None:
    """Print a method's order of work, and its lags."""
    method = options.read_method(name, settings)
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
        print_json(heading(method, plan.stages, steps) | facts)
        return
    lines = [table.grid(), "", str(plan), "", f"lag per stage: {' '.join(map(str, plan.lags))}"]
    if plan.micro_batches > 1:
        lines.append(f"micro-batches per batch: {plan.micro_batches}")
    typer.echo("\n".join(lines))


def heading(method: Method, stages: int, batches: int) -> dict[str, Any]:
    return {
        "method": method.name,
        "settings": asdict(method),
        "stages": stages,
        "batches": batches,
        "micro_batches": method.schedule(stages).micro_batches,
    }
