"""Six ways to train one small network on handwritten digits, cut into four stages.

All runs start from the same weights and see the same batches in the same order with the same
optimizer; only the order of work differs. All stages run in this process: the weights are those of
a real pipeline, the speed-up is the timing model's.

    python examples/digits.py --epochs 6 --seed 0 --out demo-output
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing import draw_curves, draw_timelines
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from offbeat import ADL, DSP, Phases, PipeDream, StaleWeights, Synchronous, Trainer
from offbeat.app.report import in_turn
from offbeat.methods import Method
from offbeat.schedules.timeline import Timeline, timeline
from offbeat.zoo import batches, digits, digits_cnn

STAGES = 4
BATCH = 64
RATE = 0.02  # of 0.005 to 0.1 BP's best start, mean of 3 seeds; nothing is tuned for the others
MOMENTUM = 0.9

Data = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is stored of one method's training."""

    name: str
    method: str
    lags: list[int]
    """The largest of each stage, read off the ledger."""
    weight_copies: list[int]
    """The most each stage held, measured after every step."""
    accuracy: list[tuple[int, float]]
    """(epoch, share of the test images that are right)."""
    ideal_speed_up: float

    @property
    def percent(self) -> float:
        return 100 * self.accuracy[-1][1]


def methods(updates: int) -> dict[str, Method]:
    return {
        "BP": Synchronous(),
        "StaleWeights": StaleWeights(),
        "hybrid": Phases((StaleWeights(), updates // 2), (Synchronous(), None)),
        "DSP": DSP(),
        "ADL": ADL(accumulate=4),
        "PipeDream": PipeDream(),
    }


# ---------------------------------------------------------------------------- training


def build(method: Method, seed: int) -> Trainer:
    torch.manual_seed(seed)  # the same initial weights for everyone
    return Trainer(
        digits_cnn(),
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM),
        method=method,
        stages=STAGES,
        seed=seed,
    )


def train(
    name: str, method: Method, data: Data, epochs: int, seed: int, tick: Callable[[], object]
) -> Run:
    x, y, x_test, y_test = data
    trainer = build(method, seed)
    accuracy: list[tuple[int, float]] = []
    for epoch in range(epochs):
        for batch in batches(x, y, BATCH, seed=seed, epoch=epoch):
            trainer.step(*batch)
            tick()
        if epoch == epochs - 1:
            trainer.flush()  # on the way the accuracy is read undrained, at the end drained
        accuracy.append((epoch + 1, trainer.evaluate([(x_test, y_test)]).accuracy or 0.0))
    return Run(
        name=name,
        method=str(method),
        lags=[max(trainer.ledger.lags(stage).values()) for stage in range(STAGES)],
        weight_copies=[stage.peak_weight_copies for stage in trainer.memory()],
        accuracy=accuracy,
        ideal_speed_up=round(modelled(method, epochs * updates_per_epoch(data)).speed_up, 4),
    )


def train_all(data: Data, epochs: int, seed: int, console: Console) -> list[Run]:
    updates = epochs * updates_per_epoch(data)
    runs = []
    # Bars need a terminal that can redraw a line; a log file gets one line per method.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, method in methods(updates).items():
            bar = progress.add_task(f"{name:12}", total=updates)
            runs.append(train(name, method, data, epochs, seed, partial(progress.advance, bar)))
            if not console.is_terminal:
                console.print(f"trained {name}: {updates} updates", highlight=False)
    return runs


def updates_per_epoch(data: Data) -> int:
    return -(-len(data[0]) // BATCH)


# ---------------------------------------------------------------------------- reporting


def modelled(method: Method, updates: int) -> Timeline:
    """The ideal timeline: equal stages, free messages, a backward twice as dear as a forward."""
    parts = []
    for phase, count in method.phases():
        shown = 20 if count is None else 8
        parts.append((timeline(phase, STAGES, steps=shown), updates if count is None else count))
        updates -= parts[-1][1]
    return in_turn(parts)


def tabulate(runs: Sequence[Run], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    heads = "lag\nper stage", "weight copies\nper stage", "test\naccuracy", "ideal\nspeed-up"
    for column in heads:
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        lags, copies = (" ".join(map(str, values)) for values in (run.lags, run.weight_copies))
        table.add_row(run.name, lags, copies, f"{run.percent:.1f} %", f"{run.ideal_speed_up:.2f}")
    return table


def notice(runs: Sequence[Run], test_images: int) -> str:
    """What this run's numbers show, and how coarse they are."""
    goal = 0.95
    first = [next((e for e, right in run.accuracy if right >= goal), "not yet") for run in runs]
    epochs = ", ".join(f"{run.name} {epoch}" for run, epoch in zip(runs, first, strict=True))
    gaps = {run.name: run.percent - runs[0].percent for run in runs[1:]}
    widest = max(gaps, key=lambda name: abs(gaps[name]))
    most = max(runs, key=lambda run: max(run.weight_copies))
    return (
        f"Notice: epochs to {goal:.0%}: {epochs}. Farthest from BP at the end: {widest},"
        f" {gaps[widest]:+.1f} points (one seed; one test image is {100 / test_images:.2f})."
        f" Most weight copies: {most.name}, {max(most.weight_copies)}."
    )


def draw_errors(read: Sequence[dict[str, Any]], images: int) -> Any:
    """On a log axis, where ends can be told apart; no error at all stands at half an image."""
    least = 50 / images
    curves = {
        run["name"]: [(epoch, max(least, 100 * (1 - share))) for epoch, share in run["accuracy"]]
        for run in read
    }
    title = "digits, four stages, one seed; log axis"
    return draw_curves(curves, ylabel="test error, %", title=title, log=True)


def save(runs: Sequence[Run], settings: dict[str, Any], folder: Path) -> list[Path]:
    """Stores the numbers, then draws from what was stored."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("runs.json", "curves.png", "timelines.png")]
    stored = {"settings": settings, "runs": [asdict(run) for run in runs]}
    paths[0].write_text(json.dumps(stored, indent=1) + "\n")
    read = json.loads(paths[0].read_text())["runs"]
    draw_errors(read, settings["test_images"]).savefig(paths[1])
    updates = settings["updates"]
    lines = {name: modelled(method, updates) for name, method in methods(updates).items()}
    four_batches = 4 * lines["BP"].step_time
    figure = draw_timelines(lines, until=four_batches, xlabel="time, in forwards of a stage")
    figure.savefig(paths[2])
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Six ways to train one network in four stages.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of weights, data split and order")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for results")
    given = parser.parse_args(arguments)
    if given.epochs < 1:
        parser.error(f"--epochs {given.epochs}: give at least 1.")
    console = Console()
    data = digits(given.seed)
    runs = train_all(data, given.epochs, given.seed, console)
    title = (
        f"{STAGES} stages, {given.epochs} epochs; SGD {RATE}, chosen for BP, not tuned per method"
    )
    console.print(tabulate(runs, title))
    console.print(notice(runs, len(data[3])), highlight=False)
    settings = {"seed": given.seed, "epochs": given.epochs, "batch": BATCH, "learning_rate": RATE}
    settings |= {"momentum": MOMENTUM, "updates": given.epochs * updates_per_epoch(data)}
    settings |= {"test_images": len(data[3])}
    settings |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for path in save(runs, settings, given.out):
        console.print(f"saved {path}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
