"""The papers' four networks, one ``offbeat train`` line each, alone and under torchrun.

A short run of each on real data: it shows that the line works and that both layouts end with the
same bits, not how well anything trains.

    python benchmarks/networks/run.py --data FOLDER --out benchmarks/networks/results.json
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from offbeat.checkpoints import load_weights

LINES = {
    "LeNet-5": "--model lenet5 --data mnist --ppv 2 --lr 0.01 --batch-size 64",
    "AlexNet": "--model alexnet --data cifar10 --ppv 3 --lr 0.01 --weight-decay 5e-4"
    " --batch-size 128",
    "VGG-16": "--model vgg16 --data cifar10 --ppv 2 --lr 0.01 --weight-decay 5e-4 --batch-size 128",
    "ResNet-20": "--model resnet20 --data cifar10 --ppv 7 --lr 0.1 --weight-decay 1e-4"
    " --batch-size 128",
}
"""With the placement vectors of the stale-weights paper for one pair of registers."""


def run(line: str, folder: Path, data: Path, steps: int, processes: int) -> dict[str, Any]:
    """One run in a folder of its own; returns its summary."""
    launch = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"]
    words = ["offbeat", "train", "--method", "stale-weights", *shlex.split(line)]
    words += ["--data-folder", str(data), "--max-steps", str(steps), "--out", str(folder)]
    command = [sys.executable, "-m", *(launch if processes > 1 else []), *words]
    print(f"$ {shlex.join(words)}  # {processes} process{'es' * (processes > 1)}", flush=True)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def same_bits(one: Path, other: Path) -> bool:
    ours, theirs = (load_weights(f / "model.safetensors") for f in (one, other))
    return list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="names, comma-separated")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, line in LINES.items():
            if arguments.only and name not in arguments.only.split(","):
                continue
            place = Path(temporary) / name
            alone = run(line, place / "1", arguments.data, arguments.steps, 1)
            together = run(line, place / "2", arguments.data, arguments.steps, 2)
            found[name] = {
                "line": f"offbeat train --method stale-weights {line}",
                "steps": arguments.steps,
                "same_bits": same_bits(place / "1", place / "2"),
                "loss": alone["loss"],
                "accuracy": alone["accuracy"],
                "lags": alone["lags"],
                "cuts": alone["cuts"],
                "rows_per_s": {"1": alone["rows_per_s"], "2": together["rows_per_s"]},
            }
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print("| network | cut at child | test accuracy | same bits alone and in two processes |")
    print("|---|---|---|---|")
    for name, row in found.items():
        if "same_bits" not in row:
            continue
        bits = "yes" if row["same_bits"] else "NO"
        print(f"| {name} | {row['cuts'][0]} | {row['accuracy']:.1%} | {bits} |")


if __name__ == "__main__":
    main()
