"""The mean squared gradient of a run against its steps, with a rate of c / sqrt(steps).

    PYTHONPATH=src python -m benchmarks.claims.convergence choose --out choice.jsonl  # c, for BP
    PYTHONPATH=src python -m benchmarks.claims.convergence run --scale 2 --out convergence.jsonl

Runs that the file already has are not repeated.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offbeat
from offbeat.averaging import Averaging, DaSGD
from offbeat.methods import Method
from offbeat.zoo import digits

HORIZONS = (250, 500, 1000, 2000, 4000, 8000)
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
BATCH = 32
LOOKS = 125
"""How often a run's whole gradient is looked at."""
WRONG_LABELS = 0.2
"""The share of a batch whose class is drawn at random, anew each time: the network can learn none
of them by heart, and the noise of a gradient does not die out as it would on clean data."""
CUTS = (2, 4, 6)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    method: Method
    momentum: float = 0.0
    averaging: Averaging | None = None


CONTESTANTS: dict[str, Contestant] = {
    "BP": Contestant(method=offbeat.Synchronous()),
    "DSP-SGD": Contestant(method=offbeat.DSP()),
    "DSP-Momentum": Contestant(method=offbeat.DSP(), momentum=0.9),
    "ADL M=4": Contestant(method=offbeat.ADL(accumulate=4)),
    "DaSGD": Contestant(method=offbeat.Synchronous(), averaging=DaSGD(every=4, delay=1, keep=0.25)),
    "DaSGD progress=1": Contestant(
        method=offbeat.Synchronous(), averaging=DaSGD(every=4, delay=1, keep=0.25, progress=1.0)
    ),
}


@dataclass(frozen=True)
class Problem:
    """``f(w)``: the cross-entropy over all rows, in the mean over the random classes too."""

    x: Tensor
    y: Tensor

    @staticmethod
    def digits() -> "Problem":
        images, classes, _, _ = digits()
        return Problem(images.flatten(1), classes)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows drawn at random with replacement, without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            rows = torch.randint(len(self.y), (BATCH,), generator=generator)
            wrong = torch.rand(BATCH, generator=generator) < WRONG_LABELS
            drawn = torch.randint(10, (BATCH,), generator=generator)
            yield self.x[rows], torch.where(wrong, drawn, self.y[rows])

    def look(self, model: nn.Module, weights: dict[str, Tensor]) -> tuple[float, float]:
        """``f`` and the squared norm of its whole gradient."""
        model.load_state_dict(weights)
        model.zero_grad()
        value = F.cross_entropy(model(self.x), self.y, label_smoothing=WRONG_LABELS)
        value.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return float(value.detach()), sum(float((g**2).sum()) for g in gradients)


def network() -> nn.Sequential:
    """Smooth, without BatchNorm; one linear layer per stage, from Xavier's distribution."""
    linear = [nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)]
    for layer in linear:
        nn.init.xavier_normal_(layer.weight, gain=5 / 3)
        nn.init.zeros_(layer.bias)
    first, second, third, last = linear
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third, nn.Tanh(), last)


def trainer_of(contestant: Contestant, rate: float, seed: int) -> offbeat.Trainer:
    torch.manual_seed(seed)
    replicated = contestant.averaging is not None
    return offbeat.Trainer(
        network(),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters,
            lr=rate * (1 - contestant.momentum),
            momentum=contestant.momentum,
        ),
        method=contestant.method,
        cuts=() if replicated else CUTS,
        replicas=4 if replicated else 1,
        averaging=contestant.averaging,
    )


def train(problem: Problem, name: str, scale: float, horizon: int, seed: int) -> dict[str, Any]:
    """One run from scratch: what the squared gradient was, on average and tenth by tenth."""
    began = time.perf_counter()
    trainer = trainer_of(CONTESTANTS[name], scale / sqrt(horizon), seed)
    looked_at = network()
    looks = looks_at(horizon, seed)
    squares = []
    for step, batch in zip(range(horizon), problem.batches(seed), strict=False):
        if step in looks:
            squares.append(problem.look(looked_at, trainer.state_dict())[1])
        trainer.step(*batch)
    trainer.flush()
    value, _ = problem.look(looked_at, trainer.state_dict())
    tenths = torch.tensor(squares).tensor_split(10)
    return {
        "method": name,
        "scale": scale,
        "steps": horizon,
        "seed": seed,
        "mean_squared_gradient": sum(squares) / len(squares),
        "by_tenth": [float(f"{tenth.mean():.4g}") for tenth in tenths],
        "value_at_end": value,
        "seconds": round(time.perf_counter() - began, 2),
    }


def looks_at(horizon: int, seed: int) -> set[int]:
    """One step, drawn at random, from each of equal stretches: their mean is unbiased."""
    generator = torch.Generator().manual_seed(1_000_003 * horizon + seed)
    stretch = horizon // LOOKS
    drawn = torch.randint(stretch, (LOOKS,), generator=generator)
    return {n * stretch + int(within) for n, within in enumerate(drawn)}


def wanted(what: str, scale: float, seeds: int) -> list[tuple[str, float, int, int]]:
    """Method, c, steps and seed of every run."""
    if what == "choose":  # with seeds that the comparison does not use
        return [("BP", c, 1000, seed) for c in SCALES for seed in (100, 101, 102)]
    return [
        (name, scale, steps, seed)
        for seed in range(seeds)
        for steps in HORIZONS
        for name in CONTESTANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("choose", "run"))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--scale", type=float, default=2.0, help="c of the rate c / sqrt(steps)")
    parser.add_argument("--seeds", type=int, default=6)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    stored = asked.out.read_text().splitlines() if asked.out.exists() else []
    rows = [json.loads(line) for line in stored]
    done = {(row["method"], row["scale"], row["steps"], row["seed"]) for row in rows}
    problem = Problem.digits()
    for run in wanted(asked.what, asked.scale, asked.seeds):
        if run not in done:
            row = train(problem, *run)
            print(*run, f"{row['mean_squared_gradient']:.4f}", flush=True)
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
