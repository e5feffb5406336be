"""Same bits on one GPU: stages side by side as CUDA graphs against the serial engine.

Trains under deterministic algorithms with both engines and compares every weight, buffer, loss and
lag. The cases are those of ``tests/gpu``; here they are printed and stored, one row per case.

    python -m benchmarks.one_gpu.bits --out benchmarks/one_gpu/bits.jsonl

``--part 2/4`` takes every fourth case beginning with the second, so that several processes can
share the GPU; their cases together are those of one process.
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from benchmarks.pool import need
from benchmarks.stored import write_result

from gpu.cases import CASES, compare


def main() -> None:
    parser = argparse.ArgumentParser(description="Same bits with streams.")
    parser.add_argument("--out", type=Path, default=Path("bits.jsonl"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--part", default="1/1", help="which share of the cases, such as 2/4")
    arguments = parser.parse_args()
    need("cuda")
    number, parts = map(int, arguments.part.split("/"))
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    rows: list[dict[str, Any]] = []
    for case in CASES[number - 1 :: parts]:
        if arguments.only not in case.name:
            continue
        try:
            rows.append(compare(case))
        except Exception as error:  # the other cases are still worth knowing
            rows.append({"case": case.name, "error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
        print(json.dumps(rows[-1]), flush=True)
        print(f"{case.name}: {rows[-1].get('differing elements')} differing elements", flush=True)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": rows}
    write_result(arguments.out, result, "cases.*")


if __name__ == "__main__":
    main()
