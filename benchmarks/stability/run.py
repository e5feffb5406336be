"""How large a learning rate is stable on a quadratic, with lag, by correction: found by running.

PYTHONPATH=src python -m benchmarks.stability.run --out benchmarks/stability/results.json
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import offbeat
from offbeat.corrections import Correction, Extrapolate, LookAhead, Predict, SpikeCompensation

LAGS = (1, 2, 4, 8)
DIFFERENCE = Predict(direction="difference", horizon="lag")
RULES: dict[str, tuple[float, list[Correction]]] = {
    "SGD": (0.0, []),
    "momentum 0.9": (0.9, []),
    "look-ahead": (0.9, [LookAhead()]),
    "spike-compensation": (0.9, [SpikeCompensation()]),
    "predict, geometric": (0.9, [Predict()]),
    "predict, lag": (0.9, [Predict(horizon="lag")]),
    "predict, lag, difference": (0.9, [DIFFERENCE]),
    "extrapolate": (0.9, [Extrapolate()]),
    "predict, lag + spike-compensation": (0.9, [Predict(horizon="lag"), SpikeCompensation()]),
    "predict, lag, difference + spike-compensation": (0.9, [DIFFERENCE, SpikeCompensation()]),
}


class Vector(nn.Module):
    """As many independent problems of one weight each, trained at once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.weight)


def diverges(
    curvatures: Tensor, lag: int, momentum: float, corrections: list[Correction], steps: int
) -> Tensor:
    """For f = curvature w^2 / 2 each: whether |w| still grows in the last quarter of a run."""
    vector = Vector(len(curvatures))
    trainer = offbeat.Trainer(
        [vector, *(nn.Identity() for _ in range(lag))],
        loss=lambda output, curvature: 0.5 * (curvature * output**2).sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=1 - momentum, momentum=momentum),
        method=offbeat.PipeDream(),
        corrections=corrections,
    )
    sizes = []
    for _ in range(steps):
        trainer.step(torch.ones_like(curvatures), curvatures)
        sizes.append(vector.weight.detach().abs().clone())
    quarters = torch.stack(sizes).unflatten(0, (4, -1)).amax(1)
    return torch.logical_not(quarters[3] <= quarters[2])


def threshold(lag: int, momentum: float, corrections: list[Correction], steps: int) -> float:
    """The largest stable ``lr / (1 - momentum) x curvature``, to about one part in a thousand."""
    low, high = 0.01, 4.0
    while high - low > 1e-3 * high:
        grid = torch.linspace(low, high, 61, dtype=torch.float64)
        first = int(diverges(grid, lag, momentum, corrections, steps).nonzero()[0])
        low, high = float(grid[first - 1]), float(grid[first])
    return (low + high) / 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1600)
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, (momentum, corrections) in RULES.items():
        found[name] = {
            str(lag): round(threshold(lag, momentum, corrections, asked.steps), 4) for lag in LAGS
        }
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in found[name].values())} |")
    settings = {"steps": asked.steps, "torch": torch.__version__}
    asked.out.write_text(json.dumps({"settings": settings, "thresholds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
