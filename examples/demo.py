"""The same run twice, in one process and in two, compared bit for bit; then a page about both.

    python examples/demo.py --out demo-output

Every command is printed before it runs, so that it can be typed again.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from offbeat.checkpoints import load_weights

SETTINGS = "--model digits-cnn --data digits --method stale-weights --stages 2 --lr 0.02"


def run(words: list[str]) -> None:
    """Shows a command as a user would type it, and runs it with one thread per process."""
    shown = ["torchrun" if word == "torch.distributed.run" else word for word in words]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    python = [sys.executable, "-m"]
    subprocess.run([*python, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def compare(one: Path, other: Path) -> int:
    """How many of the weights' bits differ between two stored runs."""
    ours, theirs = (load_weights(folder / "model.safetensors") for folder in (one, other))
    assert list(ours) == list(theirs)
    return sum(
        int((ours[name].view(torch.uint8) != theirs[name].view(torch.uint8)).sum())
        if ours[name].dim()
        else int(ours[name] != theirs[name])
        for name in ours
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args(argv)
    alone, together = arguments.out / "one-process", arguments.out / "two-processes"
    for folder in (alone, together, arguments.out / "report"):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    settings = [*SETTINGS.split(), "--epochs", str(arguments.epochs)]
    run(["offbeat", "train", *settings, "--out", str(alone)])
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "-m"]
    run([*launch, "offbeat", "train", *settings, "--out", str(together)])
    different = compare(alone, together)
    print(f"\nbytes that differ between the final weights of the two runs: {different}")
    if different:
        sys.exit("the two runs should agree bit for bit: please report this.")
    run(["offbeat", "report", str(alone), str(together), "--out", str(arguments.out / "report")])


if __name__ == "__main__":
    main()
