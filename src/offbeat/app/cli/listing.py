"""``offbeat methods`` and ``offbeat corrections``: what there is to choose from."""

from dataclasses import asdict, fields
from typing import Any

import typer

from offbeat.app.cli.options import Json
from offbeat.app.cli.printing import print_columns, print_json
from offbeat.methods import METHODS
from offbeat.registry import spell_settings


def methods(as_json: Json = False) -> None:
    """List the methods: lag, memory, locks, paper."""
    kinds: list[dict[str, Any]] = [
        {
            "name": method.name,
            "lag": method.lag_formula,
            "weight_copies": method.copies,
            "backward": asdict(method).get("backward"),
            "waits_for": method.waits_for,
            "reference": method.reference,
            "settings": asdict(method),
        }
        for method in (kind() for kind in METHODS)
    ]
    if as_json:
        print_json(kinds)
        return
    keys = [key for key in kinds[0] if key != "settings"]
    head = ["name", "lag", "copies", "backward", "waits for", "reference"]
    print_columns([head, *([kind[key] or "-" for key in keys] for kind in kinds)])
    typer.echo(
        "\nlag: updates between a batch's forward and the application of its gradient, at"
        "\nstage k = 0 ... K-1 of K; M micro-batches per update divide it by M, rounded up."
        "\ncopies: of the weights, per stage. backward: the weights it sees, by default."
    )


def corrections(as_json: Json = False) -> None:
    """List the corrections: what each changes, its settings, memory, paper."""
    from offbeat.corrections import CORRECTIONS

    kinds: list[dict[str, Any]] = [
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
        print_json(kinds)
        return
    head = ["name", "acts on", "settings", "copies", "reference"]
    written = [kind | {"settings": spell_settings(kind["settings"]) or "-"} for kind in kinds]
    print_columns([head, *(list(map(str, kind.values())) for kind in written)])
    typer.echo(
        "\ncopies: further ones of a stage's weights, D being its lag. A stage without lag is left"
        "\nalone by all of them. As in: offbeat train --correction predict:horizon=lag"
    )
