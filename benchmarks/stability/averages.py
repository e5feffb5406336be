"""How large a learning rate every averaging is stable with on a quadratic: found by running.

PYTHONPATH=src python -m benchmarks.stability.averages --out benchmarks/stability/averages.jsonl
"""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.stability.run import Vector
from torch import Tensor, nn

import offbeat
from offbeat.averaging import (
    CO2,
    DPSGD,
    AllReduce,
    Averaging,
    CoCoD,
    DaSGD,
    DiLoCo,
    EagerDiLoCo,
    HierarchicalSGD,
    LocalSGD,
    NoLoCo,
    OverlapLocalSGD,
    StreamingDiLoCo,
)
from offbeat.averaging.base import OptimizerState

REPLICAS = 4
RULES: dict[str, Averaging] = {
    "AllReduce()": AllReduce(),
    "LocalSGD(4)": LocalSGD(4),
    "HierarchicalSGD(4, size=2, rounds=2)": HierarchicalSGD(4, size=2, rounds=2),
    "DaSGD(4, 1)": DaSGD(4, 1),
    "DaSGD(4, 2)": DaSGD(4, 2),
    "DaSGD(4, 3)": DaSGD(4, 3),
    "DaSGD(4, 4)": DaSGD(4, 4),
    "DaSGD(4, 1, keep=0)": DaSGD(4, 1, keep=0.0),
    "DaSGD(4, 1, progress=1)": DaSGD(4, 1, progress=1.0),
    "DaSGD(4, 4, progress=1)": DaSGD(4, 4, progress=1.0),
    "CoCoD(4)": CoCoD(4),
    "DPSGD()": DPSGD(),
    "DPSGD(4)": DPSGD(4),
    "OverlapLocalSGD(4)": OverlapLocalSGD(4),
    "OverlapLocalSGD(4, momentum=0.7)": OverlapLocalSGD(4, momentum=0.7),
    "DiLoCo(4)": DiLoCo(4),
    "NoLoCo(4)": NoLoCo(4),
    "StreamingDiLoCo(4, delay=1)": StreamingDiLoCo(4, fragments=1, delay=1),
    "StreamingDiLoCo(4, delay=4)": StreamingDiLoCo(4, fragments=1, delay=4),
    "EagerDiLoCo(4)": EagerDiLoCo(4),
    "CO2(4)": CO2(4),
}
MODES = ("mean", "disagreement")
NEGLIGIBLE = 1e-9
"""Of the weights: what rounding makes of one mode while the other grows."""


def sizes_of(
    averaging: Averaging, curvatures: Tensor, momentum: float, steps: int
) -> dict[str, Tensor]:
    """For f = curvature w^2 / 2 each, lr 1: by mode the largest |w| in each quarter of a run.

    In the first round every replica is pulled to a place of its own, which stirs all modes.
    """
    trainer = offbeat.Trainer(
        nn.Sequential(Vector(len(curvatures))),
        loss=lambda output, target: 0.5 * (curvatures * (output - target) ** 2).sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=momentum),
        replicas=REPLICAS,
        averaging=averaging,
    )
    x = torch.ones(REPLICAS, len(curvatures), dtype=torch.float64)
    places = torch.randn(8, *x.shape, generator=torch.Generator().manual_seed(1)).double()
    weights = [worker.stage.parameters[0] for worker in trainer._engine.workers]
    seen: dict[str, list[Tensor]] = {mode: [] for mode in MODES}
    for step in range(steps):
        trainer.step(x, places[step] if step < len(places) else torch.zeros_like(x))
        now = torch.stack([weight.detach() for weight in weights])
        mean = now.mean(0)
        seen["mean"].append(mean.abs())
        seen["disagreement"].append((now - mean).abs().amax(0))
    return {mode: torch.stack(s).unflatten(0, (4, -1)).amax(1) for mode, s in seen.items()}


def diverges(
    averaging: Averaging, curvatures: Tensor, momentum: float, steps: int
) -> dict[str, Tensor]:
    """By mode, whether it still grows in the last quarter of a run."""
    sizes = sizes_of(averaging, curvatures, momentum, steps)
    whole = sum(sizes[mode] for mode in MODES)
    assert isinstance(whole, Tensor)
    return {
        mode: torch.logical_not(q[3] <= q[2]) & torch.logical_not(q[3] <= NEGLIGIBLE * whole[3])
        for mode, q in sizes.items()
    }


CURVATURES = torch.logspace(-2.3, 0.7, 6900, dtype=torch.float64)
"""From 0.005 to 5, each one part in a thousand above the one before."""


def thresholds(averaging: Averaging, momentum: float, steps: int) -> dict[str, float | None]:
    """By mode the largest stable ``lr x curvature``; None: none of those tried diverged."""
    found: dict[str, float | None] = {}
    for mode, grows in diverges(averaging, CURVATURES, momentum, steps).items():
        first = int(grows.double().argmax())
        between = (CURVATURES[max(0, first - 1)] * CURVATURES[first]).sqrt()
        found[mode] = round(float(between), 4) if bool(grows.any()) else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1600)
    asked = parser.parse_args()
    logging.getLogger("offbeat").setLevel(logging.ERROR)  # that losses grow is what is looked for
    rows = [{"steps": asked.steps, "replicas": REPLICAS, "torch": torch.__version__}]
    asked.out.write_text(json.dumps(rows[0]) + "\n")
    for name, averaging in RULES.items():
        for momentum in (0.0, 0.9):
            policies: tuple[OptimizerState, ...] = ("keep",)
            if momentum and averaging.plan():
                policies = ("keep", "average")
            for policy in policies:
                own = replace(averaging, optimizer_state=policy)
                row: dict[str, object] = {"rule": name, "momentum": momentum, "state": policy}
                row |= thresholds(own, momentum, asked.steps)
                with asked.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
