"""What there is to choose from: ``offbeat methods``, ``corrections``, ``averagings``, ``models``,
``data``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields
from inspect import Parameter, getdoc, signature
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
    _print_with_settings(kinds, ["name", "acts on", "settings", "copies", "reference"])
    typer.echo(
        "\ncopies: further ones of a stage's weights, D being its lag. A stage without lag"
        "\nis left alone by all of them. As in:"
        "\noffbeat train --correction predict:horizon=lag"
    )


def averagings(as_json: Json = False) -> None:
    """List the averagings: how replicas are kept together, their settings, paper."""
    from offbeat.averaging import AVERAGINGS

    kinds: list[dict[str, Any]] = [
        {
            "name": kind.name,
            "about": _about(kind),
            "settings": {f.name: _default(f) for f in fields(kind) if f.name not in _COMMON},
            "required": [f.name for f in fields(kind) if f.default is MISSING],
            "reference": kind.reference,
        }
        for kind in AVERAGINGS
    ]
    if as_json:
        print_json(kinds)
        return
    _print_with_settings(kinds, ["name", "what it does", "settings", "reference"])
    typer.echo(
        f"\nAll of them also take {', '.join(_COMMON[:-1])} and {_COMMON[-1]}.\n"
        "Dots stand for a number that must be given, as in:\n"
        "offbeat train --replicas 2 --averaging dasgd:every=4,delay=1"
    )


_COMMON = ("warmup", "optimizer_state", "statistics", "compress", "exact")
"""Settings that every averaging takes."""


def models(as_json: Json = False) -> None:
    """List the networks of the zoo: what each is, its settings."""
    from offbeat.zoo.networks import NETWORKS, settings_of

    kinds: list[dict[str, Any]] = [
        {
            "name": name,
            "about": _about(getattr(build, "func", build)),
            "settings": {k: None if v is ... else v for k, v in settings_of(name).items()},
            "required": [k for k, v in settings_of(name).items() if v is ...],
        }
        for name, build in NETWORKS.items()
    ]
    if as_json:
        print_json(kinds)
        return
    _print_with_settings(_families(kinds), ["name", "what it is", "settings"])
    typer.echo(
        "\nclasses, channels, inputs, side, vocabulary and context are filled in from the\n"
        "data. Every CIFAR ResNet works by its name, as resnet26. As in:\n"
        "offbeat train --model mlp:hidden=64,32"
    )


def data(as_json: Json = False) -> None:
    """List the data of the zoo: what each is, its settings."""
    from offbeat.zoo.data.sets import DATA

    kinds: list[dict[str, Any]] = [
        {"name": name, "about": _about(find), "settings": _settings_of(find), "required": []}
        for name, find in DATA.items()
    ]
    if as_json:
        print_json(kinds)
        return
    _print_with_settings(kinds, ["name", "what it is", "settings"])
    typer.echo(
        "\nIt is looked for in --data-folder, then in $OFFBEAT_DATA or ~/.cache/offbeat,\n"
        "and downloaded last. As in: offbeat train --data text:file=a.txt --model gpt"
    )


def _about(what: Callable[..., Any]) -> str:
    """The first sentence of what its documentation says."""
    paragraph = (getdoc(what) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "")


def _default(setting: Field[Any]) -> Any:
    return None if setting.default is MISSING else setting.default


def _settings_of(build: Callable[..., Any]) -> dict[str, Any]:
    """Without the folder, which is a flag of its own, and what only Python gives."""
    parameters = signature(build).parameters.values()
    return {
        p.name: None if p.default is Parameter.empty else p.default
        for p in parameters
        if p.name not in ("folder", "download")
    }


def _families(kinds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Networks that one function makes in several depths, in one line."""
    families: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for kind in kinds:
        families.setdefault((kind["about"], str(kind["settings"])), []).append(kind)
    return [
        {**of[0], "name": of[0]["name"] + (f" to {of[-1]['name']}" if len(of) > 1 else "")}
        for of in families.values()
    ]


def _print_with_settings(kinds: Sequence[Mapping[str, Any]], head: list[str]) -> None:
    rows = []
    for kind in kinds:
        given = dict.fromkeys(kind.get("required", ()), "...")
        # A blank after each setting, so that a long list can be folded.
        spelled = (spell_settings({k: v}) for k, v in (kind["settings"] | given).items())
        written = {**kind, "settings": ", ".join(spelled) or "-"}
        rows.append([str(value) for key, value in written.items() if key != "required"])
    print_columns([head, *rows])
