"""The mean squared gradient of a run against its steps, with a rate of c / sqrt(steps).

    PYTHONPATH=src python -m benchmarks.claims.convergence choose --out choice.jsonl  # c, for BP
    PYTHONPATH=src python -m benchmarks.claims.convergence run --scale 2 --out convergence.jsonl

All seeds are trained at once, as slices of one network that have nothing to do with each other.
Runs that the file already has are not repeated.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
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

HORIZONS = (250, 500, 1000, 2000, 4000)
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
BATCH = 32
STRETCHES, EARLY = 125, 13
"""A run in equal stretches, each looked at once; the first ones, where the gradient falls by
orders of magnitude, step by step."""
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

    def batches(self, seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows drawn at random with replacement, without end: (rows, seeds, ...)."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        while True:
            drawn = [self._batch(generator) for generator in generators]
            yield torch.stack([x for x, _ in drawn], 1), torch.stack([y for _, y in drawn], 1)

    def _batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.y), (BATCH,), generator=generator)
        wrong = torch.rand(BATCH, generator=generator) < WRONG_LABELS
        drawn = torch.randint(10, (BATCH,), generator=generator)
        return self.x[rows], torch.where(wrong, drawn, self.y[rows])

    def look(self, model: nn.Module, weights: dict[str, Tensor]) -> tuple[list[float], list[float]]:
        """``f`` and the squared norm of its whole gradient, seed by seed."""
        model.load_state_dict(weights)
        model.zero_grad()
        seeds = len(next(model.parameters()))
        outputs = model(self.x.unsqueeze(1).expand(-1, seeds, -1))
        values = torch.stack(
            [F.cross_entropy(o, self.y, label_smoothing=WRONG_LABELS) for o in outputs.unbind(1)]
        )
        values.sum().backward()
        gradients = [p.grad.flatten(1) for p in model.parameters() if p.grad is not None]
        return values.tolist(), torch.cat(gradients, 1).square().sum(1).tolist()


class Linear(nn.Module):
    """As many linear layers as there are seeds: (rows, seeds, in) to (rows, seeds, out)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)


def network(seeds: Sequence[int]) -> nn.Sequential:
    """Smooth, without BatchNorm; one linear layer per stage, from Xavier's distribution."""
    first, second, third, last = (
        Linear(layers) for layers in zip(*map(first_layers, seeds), strict=True)
    )
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third, nn.Tanh(), last)


def first_layers(seed: int) -> list[nn.Linear]:
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)]
    for layer in layers:
        nn.init.xavier_normal_(layer.weight, gain=5 / 3)
        nn.init.zeros_(layer.bias)
    return layers


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The sum over seeds of each one's mean over rows."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten()) * target.shape[1]


def trainer_of(contestant: Contestant, rate: float, seeds: Sequence[int]) -> offbeat.Trainer:
    replicated = contestant.averaging is not None
    return offbeat.Trainer(
        network(seeds),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=rate * (1 - contestant.momentum), momentum=contestant.momentum
        ),
        method=contestant.method,
        cuts=() if replicated else CUTS,
        replicas=4 if replicated else 1,
        averaging=contestant.averaging,
    )


def train(
    problem: Problem, name: str, scale: float, horizon: int, seeds: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Runs from scratch: per seed the squared gradient, on average and tenth by tenth."""
    began = time.perf_counter()
    trainer = trainer_of(CONTESTANTS[name], scale / sqrt(horizon), seeds)
    looked_at = network(seeds)
    looks = looks_at(horizon)
    found = []
    for step, batch in zip(range(horizon), problem.batches(seeds), strict=False):
        if step in looks:
            found.append(problem.look(looked_at, trainer.state_dict())[1])
        trainer.step(*batch)
    trainer.flush()
    values, _ = problem.look(looked_at, trainer.state_dict())
    squares = torch.tensor(found, dtype=torch.float64)
    shares = torch.tensor(list(looks.values()), dtype=torch.float64) / horizon
    first_late = len(looks) - (STRETCHES - EARLY)
    seconds = round(time.perf_counter() - began, 1)
    for index, seed in enumerate(seeds):
        early, late = squares[:first_late, index], squares[first_late:, index]
        yield {
            "method": name,
            "scale": scale,
            "steps": horizon,
            "seed": seed,
            "mean_squared_gradient": float(shares @ squares[:, index]),
            "early": rounded(early @ shares[:first_late] / shares[:first_late].sum()),
            "later": [rounded(part.mean()) for part in late.tensor_split(9)],
            "value_at_end": round(values[index], 5),
            "seconds_of_all_seeds": seconds,
        }


def rounded(value: Tensor) -> float:
    return float(f"{value:.4g}")


def looks_at(horizon: int) -> dict[int, int]:
    """The steps at which to look, and how many steps each stands for: the mean is unbiased.

    One step is drawn from each stretch. Early stretches are 1 step long, then a tenth of what went
    before.
    """
    generator = torch.Generator().manual_seed(horizon)
    length = horizon // STRETCHES
    within = torch.randint(length, (STRETCHES,), generator=generator).tolist()
    late = {n * length + within[n]: length for n in range(EARLY, STRETCHES)}
    early: dict[int, int] = {}
    start, end = 0, EARLY * length
    while start < end:
        here = min(end - start, 1 if start < 50 else start // 10)
        drawn = int(torch.randint(here, (1,), generator=generator))
        early[start + drawn] = here
        start += here
    return early | late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("choose", "run"))
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--scale", type=float, default=2.0, help="c of the rate c / sqrt(steps)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "choose":  # with seeds that the comparison does not use
        seeds = range(100, 104)
        wanted = [("BP", scale, 1000) for scale in SCALES]
    else:
        seeds = range(8)
        wanted = [(name, asked.scale, steps) for steps in HORIZONS for name in CONTESTANTS]
    stored = asked.out.read_text().splitlines() if asked.out.exists() else []
    rows = [json.loads(line) for line in stored]
    done = {(row["method"], row["scale"], row["steps"]) for row in rows}
    problem = Problem.digits()
    for run in wanted:
        if run not in done:
            rows = list(train(problem, *run, seeds))
            print(*run, *(f"{row['mean_squared_gradient']:.4f}" for row in rows), flush=True)
            with asked.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
