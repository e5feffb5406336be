"""What a user may type behind a command, and how it is read.

Numbers arrive as text and are read here: typer's message for a bad number leaves out the number.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from offbeat.errors import ConfigurationError
from offbeat.methods import Method, method_named
from offbeat.schedules.timeline import Costs

_T = TypeVar("_T")

# Beyond these a table outgrows the memory before it outgrows the reader.
MOST_STAGES = 256
_MOST = 10_000
_LARGEST = 1e12


# Options. The costs of `timeline` own the names --backward and --hop, so the settings of these
# names are --backward-rule and --hops, on both commands.


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


NameArgument = Annotated[
    str, typer.Argument(metavar="METHOD", help="A name from 'offbeat methods', case ignored.")
]
OptionalNameArgument = Annotated[
    str | None,
    typer.Argument(metavar="METHOD", help="A name from 'offbeat methods', case ignored."),
]
MeasuredOption = Annotated[
    str | None, _option("FILE", "A ledger saved by a run, drawn instead of a model of a method.")
]
StagesOption = Annotated[str, _option("K", "Number of stages.")]
BatchesOption = Annotated[str, _option("N", "Number of batches; each is one step.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

ForwardOption = Annotated[str, _option("T", "Cost of a batch's forward at one stage.")]
RecomputeOption = Annotated[str, _option("T", "Cost of computing a forward again.")]
BackwardOption = Annotated[str, _option("T", "Cost of a batch's backward at one stage.")]
HopOption = Annotated[str, _option("T", "Cost of one message between neighbours.")]
ShareOption = Annotated[
    str | None, _option("2,1,1,1", "Weight of each stage; the total cost stays.")
]
WidthOption = Annotated[
    str | None, _option("COLUMNS", "Width of the picture, if not the terminal's.")
]

AccumulateOption = Annotated[str | None, _option("M", "Setting: micro-batches per update.")]
MicroBatchesOption = Annotated[str | None, _option("M", "Setting: the same for gpipe and 1f1b.")]
CapOption = Annotated[
    str | None, _option("N", "Setting: most micro-batches in flight at the first stage.")
]
RuleOption = Annotated[
    str | None,
    _option("RULE", "Setting: a backward's weights: stash, current, recompute.", "--backward-rule"),
]
BetaOption = Annotated[str | None, _option("X", "Setting of fdg: factor on a gradient per hop.")]
LagOption = Annotated[str | None, _option("4,2,0", "Setting of dsp: lag of each stage.")]
HopsOption = Annotated[
    str | None, _option("1,1", "Setting of dsp: ticks per hop, one for all or K-1.")
]


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
    if not abs(value) <= _LARGEST:
        raise ValueError
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(_number, text.split(",")))


def read_count(option: str, text: str, least: int = 1, most: int = _MOST) -> int:
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
    "cap": ("--cap", _whole, f"a whole number from 0 to {_MOST}"),
}


def read_method(name: str, *texts: str | None) -> Method:
    """The method with the settings the user gave, ``texts`` in the order of ``_SETTINGS``.

    A setting it lacks is refused here, because the library's message would list ``hop`` and
    ``backward``, and as options of ``timeline`` these are costs.
    """
    if ":" in name:
        raise ConfigurationError(
            f"METHOD {name!r}: settings are options here, as in 'adl --accumulate 4'."
        )
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


def read_costs(share: str | None, **texts: str) -> Costs:
    more = {"backward": "; which weights it sees is --backward-rule"}
    numbers = {
        name: _read(f"--{name}", text, _number, f"a number, as in --{name} 2{more.get(name, '')}")
        for name, text in texts.items()
    }
    rule = "a number per stage, as in --share 2,1,1,1"
    return Costs(**numbers, share=() if share is None else _read("--share", share, _numbers, rule))
