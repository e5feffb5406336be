"""``offbeat methods`` and ``offbeat corrections``: what there is to choose from."""

from dataclasses import asdict, fields
from typing import Any

import typer

from offbeat.app.cli.options import JsonOption
from offbeat.app.cli.printing import print_columns, print_json
from offbeat.methods import METHODS, Method


def methods(as_json: JsonOption = False) -> None:
    """List the methods: lag, memory, locks, paper."""
    rows = [_described(kind()) for kind in METHODS]
    if as_json:
        print_json(rows)
        return
    keys = [key for key in rows[0] if key != "settings"]
    head = ["name", "lag", "copies", "backward", "waits for", "reference"]
    print_columns([head, *([row[key] or "-" for key in keys] for row in rows)])
    typer.echo(
        "\nlag: updates between a batch's forward and the application of its gradient, at"
        "\nstage k = 0 ... K-1 of K; M micro-batches per update divide it by M, rounded up."
        "\ncopies: of the weights, per stage. backward: the weights it sees, by default."
    )


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
        print_json(rows)
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
    print_columns([head, *body])
    typer.echo(
        "\ncopies: further ones of a stage's weights, D being its lag. A stage without lag is left"
        "\nalone by all of them. As in: offbeat train --correction predict:horizon=lag"
    )


def _described(method: Method) -> dict[str, Any]:
    settings = asdict(method)
    return {
        "name": method.name,
        "lag": method.lag_formula,
        "weight_copies": method.copies,
        "backward": settings.get("backward"),
        "waits_for": method.waits_for,
        "reference": method.reference,
        "settings": settings,
    }
