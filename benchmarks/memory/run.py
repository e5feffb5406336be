"""Resident memory of every process that trains a GPT built on meta, against what it has to hold.

    python -m benchmarks.memory.run --out benchmarks/memory/results.jsonl

A GPT of 200 million weights in four stages, one per process, on the CPU, with fused
AdamW. Each process
reads the weights of its own stage from files of safetensors, trains some steps and saves them. What
it has to hold is counted: weights with the copies that the method declares, gradients, the state of
the optimizer, activations that autograd saved in one step, and the messages that wait.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import offbeat
from offbeat.checkpoints import save_weights
from offbeat.zoo import gpt

STAGES = 4
VOCABULARY, TOKENS = 8192, 32
METHODS = ("synchronous", "pipedream", "stale-weights")
MIB = 2**20


def built(layers: int, width: int) -> nn.Sequential:
    return gpt(VOCABULARY, TOKENS, layers=layers, width=width, heads=width // 64)


def resident() -> dict[str, int]:
    """Bytes of this process: resident, its share of what several have, and the most so far."""
    rollup, status = (Path(f"/proc/self/{name}").read_text() for name in ("smaps_rollup", "status"))
    lines = dict(line.split(":", 1) for line in [*rollup.splitlines()[1:], *status.splitlines()])
    names = {"rss": "Rss", "pss": "Pss", "peak": "VmHWM"}
    return {name: int(lines[key].split()[0]) * 1024 for name, key in names.items()}


def trainer_of(layers: int, width: int, method: str) -> offbeat.Trainer:
    with torch.device("meta"):
        model = built(layers, width)
    return offbeat.Trainer(
        model,
        loss=lambda output, y: nn.functional.cross_entropy(output.flatten(0, 1), y.flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        method=method,
        stages=STAGES,
    )


def train(folder: str, layers: int, width: int, method: str, steps: int) -> dict[str, Any]:
    """One process of a run: what it held, and what it had to."""
    # A small run of the same kind first: much is imported when it is first used.
    small = trainer_of(STAGES, 64, method)
    small.load_state_dict(f"{folder}-small")
    torch.manual_seed(0)
    x = torch.randint(VOCABULARY, (1, TOKENS))
    for _ in range(steps):
        small.step(x, x)
    small.flush()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident()
    trainer = trainer_of(layers, width, method)
    trainer.load_state_dict(folder)
    saved: dict[int, int] = {}
    losses = []
    for step in range(steps):
        with counted(saved, trainer) if step == steps - 1 else torch.enable_grad():
            losses.append(trainer.step(x, x))
    after = resident()
    memory = trainer.memory()[trainer.rank]
    stage = trainer._engine.workers[0].stage  # what it has to hold is counted here alone
    state = [t for o in stage.optimizers for s in o.state.values() for t in s.values()]
    own = sum(p.nbytes for p in stage.parameters)
    account = {
        "weights": own,
        "copies": memory.peak_weight_copies * own - own,
        "gradients": own,
        "optimizer": sum(t.nbytes for t in state if isinstance(t, Tensor)),
        "activations": sum(saved.values()) * max(1, memory.peak_in_flight),
        "corrections": memory.correction_bytes,
    }
    trainer.flush()
    trainer.save_pretrained(Path(folder).with_name(f"saved-{method}"))
    whole = sum(p.nbytes for p in trainer.model.parameters())
    return {
        "method": method,
        "rank": trainer.rank,
        "model": whole,
        "before": before,
        "after": after,
        "saved": resident(),
        "account": account,
        "loss": None if losses[-1] is None else float(losses[-1]),
    }


@contextmanager
def counted(saved: dict[int, int], trainer: offbeat.Trainer) -> Iterator[None]:
    """Bytes of what autograd saves, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in trainer._engine.workers[0].stage.parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/memory/results.jsonl"))
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    # Else the C library keeps what is freed, in holes that larger weights do not fit into.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "262144")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        for name, layers, width in (
            (weights, arguments.layers, arguments.width),
            (weights.with_name("weights-small"), STAGES, 64),
        ):
            name.mkdir()
            torch.manual_seed(0)
            save_weights(built(layers, width).state_dict(), name / "model.safetensors")
        for method in arguments.methods:
            found = offbeat.launch(
                train, STAGES, str(weights), arguments.layers, arguments.width, method,
                arguments.steps,
            )  # fmt: skip
            rows += found
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
            for row in found:
                held = row["saved"]["peak"] - row["before"]["rss"]
                counted_bytes = sum(row["account"].values())
                print(
                    f"{method}, rank {row['rank']}: {held / MIB:.0f} MiB at most, counted"
                    f" {counted_bytes / MIB:.0f}, {held / counted_bytes:.3f}"
                )


if __name__ == "__main__":
    main()
