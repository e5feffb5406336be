"""What the live view, the metrics and the ledger's readers cost: training with and without them.

    python benchmarks/progress/run.py --out benchmarks/progress/results.json

ResNet-20, batch 128, four stages in one process, one thread. The time inside the watchers is taken
out of the time of the steps, so that a noisy machine cannot hide it: the result is their share.
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

import offbeat
from offbeat.app.cli.live import Screen
from offbeat.app.progress import Progress, Recorder
from offbeat.app.runs import RunWriter
from offbeat.zoo import resnet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--steps", type=int, default=100)
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
    began, watching = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(RunWriter(Path(folder) / "run", {}))
        for _ in range(8):
            trainer.step(x, y)
        screen.begin(trainer, progress)
        began = time.perf_counter()
        for _ in range(arguments.steps):
            loss = trainer.step(x, y)
            progress.step += 1
            progress.loss = 0.0 if loss is None else float(loss)
            progress.rows_per_s = progress.step * 128 / (time.perf_counter() - began)
            looking = time.perf_counter()
            recorder.step(trainer, progress)
            screen.step(trainer, progress)
            watching += time.perf_counter() - looking
        whole = time.perf_counter() - began
        screen.end("finished")
    share = watching / (whole - watching)
    result = {"share": share, "steps": arguments.steps, "steps_s": whole, "watching_s": watching}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{share:.2%} of the time of the steps; under 2 %: {'yes' if share < 0.02 else 'no'}")


if __name__ == "__main__":
    main()
