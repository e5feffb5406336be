"""Same bits on a GPU: K processes that share one device against all stages in one process.

Trains a small ResNet with every method under deterministic algorithms, once per engine, and
compares every weight and buffer, every loss and every lag.

    python benchmarks/shared_gpu/run.py --out benchmarks/shared_gpu/results.json
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import offbeat
from offbeat.methods import METHODS, Method
from offbeat.zoo import resnet


def train(method: Method, stages: int, device: str, engine: Any, steps: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    model = nn.Sequential(*resnet(8), nn.Dropout(0.1)).to(device)
    trainer = offbeat.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        method=method,
        stages=stages,
        seed=1,
        engine=engine,
        timeout=120,
    )
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 3, 32, 32, generator=generator).to(device)
        y = torch.randint(10, (16,), generator=generator).to(device)
        loss = trainer.step(x, y)
        losses.append(None if loss is None else float(loss))
    losses += [float(loss) for loss in trainer.flush()]
    ledger = trainer.ledger
    return {
        "losses": losses,
        "lags": [max(ledger.lags(k).values()) for k in range(stages)],
        "state": {name: value.cpu() for name, value in trainer.state_dict().items()},
    }


def train_all(stages: int, device: str, engine: Any, steps: int) -> list[dict[str, Any]]:
    return [train(method(), stages, device, engine, steps) for method in METHODS]


def differing(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Elements of the state whose bits differ."""
    return sum(int((value.view(-1) != other[name].view(-1)).sum()) for name, value in one.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Same bits on a shared GPU.")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor()
    rows = []
    for stages in (2, 3, 4):
        alone = train_all(stages, arguments.device, "serial", arguments.steps)
        many = offbeat.launch(
            train_all, stages, stages, arguments.device, "processes", arguments.steps
        )
        for place, method in enumerate(METHODS):
            row = {
                "method": method.name,
                "stages": stages,
                "differing_elements": max(
                    differing(rank[place]["state"], alone[place]["state"]) for rank in many
                ),
                "losses_equal": all(
                    rank[place]["losses"] == alone[place]["losses"] for rank in many
                ),
                "lags": many[0][place]["lags"],
                "declared_lags": list(method().lags(stages)),
            }
            rows.append(row)
            print(row, flush=True)
    good = sum(r["differing_elements"] == 0 and r["losses_equal"] for r in rows)
    environment = {"torch": torch.__version__, "device": name, "steps": arguments.steps}
    arguments.out.write_text(
        json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
    )
    print(f"{good} of {len(rows)} runs give the same bits")


if __name__ == "__main__":
    main()
