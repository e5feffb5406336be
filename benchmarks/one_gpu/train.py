"""Real training on one GPU: seconds against test accuracy, CIFAR-10 and a ResNet, bf16.

Plain backpropagation as one CUDA graph, the fastest synchronous way without compiling, against four
stages side by side. Same data in the same order, same optimizer and schedule, same epochs. Seconds
are those of training with all it needs, recording included, without evaluation. Every kind of run
has trained a little before, so that nobody pays for what the GPU's libraries do on first use.

    python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz parts
    python -m benchmarks.one_gpu.train --data parts --out benchmarks/one_gpu/training.jsonl
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks.averaging.data import Cifar
from benchmarks.pool import need
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.methods import Method, Phases, PipeDream, StaleWeights, Synchronous
from offbeat.zoo import resnet

ROWS, STAGES = 128, 4
WARM_UP = 60
LR, MOMENTUM, DECAY = 0.1, 0.9, 5e-4


Way = tuple[Method, list[str]]
"""A method and corrections."""


def ways(steps: int) -> dict[str, Way]:
    synchronous_end = Phases((PipeDream(), steps - steps // 10), (Synchronous(), None))
    return {
        "lag 3": (PipeDream(), []),
        "lag 3, spike compensation": (PipeDream(), ["spike-compensation"]),
        "lag 3, last tenth synchronous": (synchronous_end, []),
        "lag 2, two micro-batches": (PipeDream(accumulate=2), []),
        "lag 2, two micro-batches, spike compensation": (
            PipeDream(accumulate=2),
            ["spike-compensation"],
        ),
        "lag 6": (StaleWeights(), []),
    }


def model(depth: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = resnet(depth).cuda()
    made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made


def optimizer(params: Any) -> torch.optim.Optimizer:
    lr = torch.tensor(LR, device="cuda")  # on the device, so that recordings can read it
    return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM, weight_decay=DECAY, fused=True)


def schedule(steps: int) -> Callable[[Any], LambdaLR]:
    warm_up = steps // 10

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))

    return lambda made: LambdaLR(made, factor)


class Backpropagation:
    """The whole step as one CUDA graph."""

    def __init__(self, depth: int, seed: int, steps: int, first: tuple[Tensor, Tensor]) -> None:
        self._model = model(depth, seed)
        self._optimizer = optimizer(self._model.parameters())
        self._scheduler = schedule(steps)(self._optimizer)
        self._x, self._y = (value.clone() for value in first)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    def _work(self) -> None:
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(self._model(self._x), self._y)
        loss.backward()
        self._optimizer.step()

    def step(self, x: Tensor, y: Tensor) -> None:
        self._x.copy_(x)
        self._y.copy_(y)
        if self._steps < 3:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._work()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._work()
            self._graph.replay()
        self._steps += 1
        self._scheduler.step()

    def finish(self) -> None: ...

    @torch.no_grad()
    def accuracy(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        self._model.eval()
        hits, rows = 0, 0
        with torch.autocast("cuda", torch.bfloat16):
            for x, y in batches:
                hits += int((self._model(x).argmax(1) == y).sum())
                rows += len(y)
        self._model.train()
        return hits / rows


class SideBySide:
    def __init__(self, depth: int, seed: int, steps: int, way: Way) -> None:
        method, corrections = way
        self._trainer = offbeat.Trainer(
            model(depth, seed),
            loss=F.cross_entropy,
            optimizer=optimizer,
            scheduler=schedule(steps),
            method=method,
            corrections=corrections,
            stages=STAGES,
            balance="measured",
            autocast=torch.bfloat16,
            engine="streams",
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        self._trainer.step(x, y)

    def finish(self) -> None:
        self._trainer.flush()

    def accuracy(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        found = self._trainer.evaluate(batches).accuracy
        assert found is not None
        return found


def built(name: str, arguments: argparse.Namespace, data: Cifar, seed: int) -> Any:
    steps = arguments.epochs * (len(data) // ROWS)
    if name != "backpropagation":
        return SideBySide(arguments.depth, seed, steps, ways(steps)[name])
    x, y = next(data.batches(ROWS, seed=seed, epoch=0))
    first = x.to(memory_format=torch.channels_last), y
    return Backpropagation(arguments.depth, seed, steps, first)


def warm_up(run: Any, data: Cifar) -> None:
    for x, y in islice(data.batches(ROWS, seed=0, epoch=0), WARM_UP):
        run.step(x.to(memory_format=torch.channels_last), y)
    run.accuracy(data.test)
    torch.cuda.synchronize()


def train(run: Any, data: Cifar, seed: int, epochs: int) -> list[dict[str, float]]:
    """Seconds and accuracy after every epoch."""
    rows = []
    seconds = 0.0
    for epoch in range(epochs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for x, y in data.batches(ROWS, seed=seed, epoch=epoch):
            run.step(x.to(memory_format=torch.channels_last), y)
        if epoch == epochs - 1:
            run.finish()
        torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        rows.append({"epoch": epoch + 1, "seconds": seconds, "accuracy": run.accuracy(data.test)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds against accuracy on one GPU.")
    parser.add_argument("--data", type=Path, required=True, help="folder of parts, see pack.py")
    parser.add_argument("--depth", type=int, default=56)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", help="names of runs; by default all")
    parser.add_argument("--out", type=Path, default=Path("training.jsonl"))
    arguments = parser.parse_args()
    need("cuda", arguments.data)
    torch.backends.cudnn.benchmark = True
    data = Cifar(arguments.data, torch.device("cuda"), rows=50_000)
    data.test = [(x.to(memory_format=torch.channels_last), y) for x, y in data.test]
    names = arguments.only or ["backpropagation", *ways(1000)]
    for name in names:
        warm_up(built(name, arguments, data, seed=0), data)
    for seed in arguments.seeds:
        for name in names:
            gc.collect()  # recordings hold their memory until they are gone
            torch.cuda.empty_cache()
            run = built(name, arguments, data, seed)
            row = {
                "run": name,
                "network": f"resnet-{arguments.depth}",
                "seed": seed,
                "rows": len(data),
                "device": torch.cuda.get_device_name(),
                "epochs": train(run, data, seed, arguments.epochs),
            }
            with arguments.out.open("a") as file:  # run by run: a limit may end this script
                file.write(json.dumps(row) + "\n")
            last = row["epochs"][-1]
            print(name, seed, f"{last['seconds']:.1f} s, {last['accuracy']:.4f}", flush=True)
            del run


if __name__ == "__main__":
    main()
