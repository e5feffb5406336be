"""What the live view, the metrics and the ledger's readers cost: training with and without them.

    python benchmarks/progress/run.py --out benchmarks/progress/results.json

ResNet-20, batch 128, four stages in one process, one thread. Blocks of steps with and without
watchers take turns; the result is the median over rounds of the ratio within a round.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

import offbeat
from offbeat.cli.live import Screen
from offbeat.runs import RunWriter
from offbeat.training import Progress, Recorder
from offbeat.zoo import resnet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    trainer = offbeat.Trainer(
        resnet(20),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        method=offbeat.StaleWeights(),
        stages=4,
    )
    progress = Progress(epochs=1, steps_per_epoch=10_000)
    screen = Screen(Console(file=io.StringIO(), force_terminal=True, width=100))
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(RunWriter(Path(folder) / "run", {}))
        for _ in range(8):
            trainer.step(x, y)
        screen.begin(trainer, progress)

        def block(watched: bool) -> float:
            began = time.perf_counter()
            for _ in range(arguments.steps):
                loss = trainer.step(x, y)
                progress.step += 1
                progress.loss = 0.0 if loss is None else float(loss)
                if watched:
                    recorder.step(trainer, progress)
                    screen.step(trainer, progress)
            return time.perf_counter() - began

        for number in range(arguments.rounds):
            pair = [block(watched) for watched in ((True, False) if number % 2 else (False, True))]
            with_it, without = pair if number % 2 else pair[::-1]
            ratios.append(with_it / without)
            print(f"round {number + 1}: {ratios[-1]:.4f}", flush=True)
        screen.end("finished")
    median = statistics.median(ratios)
    result = {"median_ratio": median, "ratios": ratios, "steps_per_block": arguments.steps}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{median:.4f} times the time without; under 2 %: {'yes' if median < 1.02 else 'no'}")


if __name__ == "__main__":
    main()
