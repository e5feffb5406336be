"""Random programs against the library: how many end with the bits, how many are refused in words.

    PYTHONPATH=src:tests OMP_NUM_THREADS=1 python -m benchmarks.programs.run \\
        --parts 40 --examples 50 --out benchmarks/programs/results.jsonl

A program (`tests/programs.py`) is a model with quirks, its batches, a method and what a script does
meanwhile; `tests/test_programs.py` says what must come out. A row is a part with its seed; it is
written when the part is done, and a run goes on behind the rows that are there. Anything that is
neither exact nor refused by an OffbeatError is wrong, and its program is in the row.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks.stored import read_rows
from hypothesis import HealthCheck, Phase, given, seed, settings

from programs import Program, has_lag, programs
from test_programs import outcome

KINDS = ("blocks", "blocks", "blocks", "sequential", "sequential", "traced")


def try_part(number: int, examples: int) -> dict[str, Any]:
    found: Counter[str] = Counter()
    wrong: list[str] = []

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(KINDS))
    def go(program: Program) -> None:
        try:
            end = outcome(program).partition(":")[0]
        except Exception as error:  # which is what is looked for
            end = "wrong"
            wrong.append(f"{type(error).__name__}: {str(error)[:200]} in {program}")
        found[end] += 1
        found[program.kind] += 1
        found["with lag"] += has_lag(program.method)

    go()
    return {"seed": number, "torch": torch.__version__, **sorted_counts(found), "programs": wrong}


def sorted_counts(found: Counter[str]) -> dict[str, int]:
    names = ("exact", "refused", "wrong", "with lag", "blocks", "sequential", "traced")
    return {name: found[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--parts", type=int, default=40)
    parser.add_argument("--first", type=int, default=1, help="seed of the first part")
    parser.add_argument("--examples", type=int, default=50, help="of a part")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = {row["seed"] for row in read_rows(arguments.out)} if arguments.out.exists() else set()
    for number in range(arguments.first, arguments.first + arguments.parts):
        if number in done:
            continue
        row = try_part(number, arguments.examples)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({name: value for name, value in row.items() if name != "programs"}, flush=True)


if __name__ == "__main__":
    main()
