"""``offbeat methods`` and ``offbeat corrections``: what there is to choose from."""

from dataclasses import asdict, fields
from typing import Any

import typer

from offbeat.app.cli.options import Json
from offbeat.app.cli.printing import print_columns, print_json
from offbeat.methods import METHODS, Method
from offbeat.registry import spell_settings


def methods(as_json: Json = False) -> None:
    """List the methods: lag, memory, locks, paper."""
    kinds = [_describe(kind()) for kind in METHODS]
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
    body = [
        [spell_settings(value) or "-" if key == "settings" else str(value) for key, value in of]
        for of in map(dict.items, kinds)
    ]
    print_columns([head, *body])
    typer.echo(
        "\ncopies: further ones of a stage's weights, D being its lag. A stage without lag is left"
        "\nalone by all of them. As in: offbeat train --correction predict:horizon=lag"
    )


def _describe(method: Method) -> dict[str, Any]:
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
