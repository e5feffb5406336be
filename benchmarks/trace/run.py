"""The way of a batch: which functions of offbeat a training step calls, across which files.

    PYTHONPATH=src python -m benchmarks.trace.run --out benchmarks/trace/results.json

Two stages in one process under PipeDream, once the pipe is full. A call goes from the nearest
function of offbeat that is still running to the one that begins; comprehensions and lambdas count
as functions. Whoever reads along crosses from file to file twice per call of another file, there
and back. PYTHONPATH decides which tree is traced, so that an older one can be compared.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import offbeat

PACKAGE = Path(offbeat.__file__).parent
STEPS_BEFORE = 8
"""Which fill the pipe, and look at whatever is looked at once."""


@dataclass(frozen=True)
class Trace:
    """The calls of one step, by "caller -> callee", as in ``stages/stage.py:Stage.forward``."""

    calls: dict[str, int]

    def pairs(self) -> Counter[tuple[str, str]]:
        """Calls by the files of caller and callee."""
        found: Counter[tuple[str, str]] = Counter()
        for pair, count in self.calls.items():
            caller, callee = (name.split(":")[0] for name in pair.split(" -> "))
            found[caller, callee] += count
        return found

    @property
    def functions(self) -> set[str]:
        return {pair.split(" -> ")[1] for pair in self.calls}

    def figures(self) -> dict[str, int]:
        across = sum(n for (caller, callee), n in self.pairs().items() if caller != callee)
        return {
            "calls": sum(self.calls.values()),
            "functions": len(self.functions),
            "files": len({name.split(":")[0] for name in self.functions}),
            "crossings": 2 * across,
        }

    def __str__(self) -> str:
        figures = ", ".join(f"{count} {name}" for name, count in self.figures().items())
        crossing = [(n, *pair) for pair, n in self.pairs().items() if pair[0] != pair[1]]
        rows = [f"| {caller} | {callee} | {n} |" for n, caller, callee in sorted(crossing)[::-1]]
        return "\n".join([figures, "", "| from | to | calls |", "|---|---|---|", *rows])


def trace(work: Callable[[], Any]) -> Trace:
    """What ``work`` calls within the package."""
    calls: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (callee := name_of(frame)) is not None:
            above = frame.f_back
            while above is not None and name_of(above) is None:
                above = above.f_back
            caller = "the user:" if above is None else name_of(above)
            calls[f"{caller} -> {callee}"] += 1

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Trace(dict(sorted(calls.items())))


def name_of(frame: FrameType) -> str | None:
    """File and function; None of what is not the package's."""
    code = frame.f_code
    if not code.co_filename.startswith(str(PACKAGE)):
        return None
    file = Path(code.co_filename).relative_to(PACKAGE)
    return f"{file.as_posix()}:{code.co_qualname}"


def trace_step() -> Trace:
    """One step of two stages under PipeDream, in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    trainer = offbeat.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        method=offbeat.PipeDream(),
        cuts=[2],
    )
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    for _ in range(STEPS_BEFORE):
        trainer.step(x, y)
    return trace(lambda: trainer.step(x, y))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the raw result goes")
    arguments = parser.parse_args()
    found = trace_step()
    print(found)
    if arguments.out is not None:
        result = {"figures": found.figures(), **asdict(found)}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
