"""What a user may type behind a command, and how it is read.

Numbers arrive as text and are read here: typer's message for a bad number leaves out the number.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from offbeat.errors import ConfigurationError
from offbeat.methods import Method, method_named
from offbeat.registry import Choice
from offbeat.schedules.timeline import Costs

_T = TypeVar("_T")

# Beyond these a table outgrows the memory before it outgrows the reader.
MOST_STAGES = 256
_MOST = 10_000
_LARGEST = 1e12


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


_METHOD = typer.Argument(
    metavar="METHOD", help="A name from 'offbeat methods', case ignored, as in adl:accumulate=4."
)
MethodText = Annotated[str, _METHOD]
OptionalMethodText = Annotated[str | None, _METHOD]
Measured = Annotated[
    str | None, _option("FILE", "A ledger saved by a run, drawn instead of a model of a method.")
]
Stages = Annotated[str, _option("K", "Number of stages.")]
Batches = Annotated[str, _option("N", "Number of batches; each is one step.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Forward = Annotated[str, _option("T", "Cost of a batch's forward at one stage.")]
Recompute = Annotated[str, _option("T", "Cost of computing a forward again.")]
Backward = Annotated[str, _option("T", "Cost of a batch's backward at one stage.")]
Hop = Annotated[str, _option("T", "Cost of one message between neighbours.")]
Share = Annotated[str | None, _option("2,1,1,1", "Weight of each stage; the total cost stays.")]
Width = Annotated[str | None, _option("COLUMNS", "Width of the picture, if not the terminal's.")]


def read_method(text: str) -> Method:
    """The method with its settings, as ``adl:accumulate=4``."""
    choice = Choice.read(text, "METHOD")
    return method_named(choice.name, **choice.settings)


# A parser raises ValueError for what breaks its rule.
def _read(option: str, text: str, parse: Callable[[str], _T], rule: str) -> _T:
    try:
        return parse(text)
    except ValueError:
        raise ConfigurationError(f"{option} {text!r}: give {rule}.") from None


def _number(text: str) -> float:
    value = float(text)
    if not abs(value) <= _LARGEST:
        raise ValueError
    return value


def read_count(option: str, text: str, least: int = 1, most: int = _MOST) -> int:
    def parse(text: str) -> int:
        if not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return _read(option, text, parse, f"a whole number from {least} to {most}")


def read_costs(share: str | None, **texts: str) -> Costs:
    more = "; which weights it sees is a setting of the method, as in ddg:backward=stash"
    numbers = {}
    for name, text in texts.items():
        rule = f"a number, as in --{name} 2{more if name == 'backward' else ''}"
        numbers[name] = _read(f"--{name}", text, _number, rule)
    shares: tuple[float, ...] = ()
    if share is not None:
        rule = "a number per stage, as in --share 2,1,1,1"
        shares = _read("--share", share, lambda text: tuple(map(_number, text.split(","))), rule)
    return Costs(**numbers, share=shares)
