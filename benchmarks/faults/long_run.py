"""Memory and checkpoints of a long run: both stay as they are from the first checkpoint on.

    python -m benchmarks.faults.long_run --steps 100000 --out benchmarks/faults/long-run.jsonl

A small network in two stages, every action recorded. A row for each tenth of the run: the memory of
the process, the size of an exact checkpoint, that of the file of older actions beside it, and how
many actions there have been. ``--keep-all`` keeps them in memory, as was done before.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import offbeat


def memory_mb() -> float:
    """What this process has of the machine's memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def size_of(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--keep-all", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = offbeat.Trainer(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        method="stale-weights",
        cuts=[2],
    )
    if given.keep_all:
        trainer.own_ledger.most = 1 << 60
    x, y = torch.ones(2, 4), torch.zeros(2).long()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in range(1, given.steps + 1):
            trainer.step(x, y)
            if step == 1 or step % (given.steps // 10) == 0:
                place = trainer.save(folder, wait=True, keep=1)
                row = {
                    "steps": step,
                    "kept": "all" if given.keep_all else "newest",
                    "actions": len(trainer.own_ledger),
                    "memory_mb": round(memory_mb(), 1),
                    "checkpoint_bytes": size_of(place, "*"),
                    "older_bytes": size_of(folder, "ledger-*.rows"),
                    "seconds": round(time.monotonic() - began, 1),
                }
                print(json.dumps(row), flush=True)
                if given.out is not None:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
