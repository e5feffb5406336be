"""Draws the picture of the README: what lag is, from the ledgers of two small runs.

python docs/lag.py --out docs    # lag.gif, and lag.png for readers without animation

The order of work and the versions of the weights are the ledgers'. Where a block lies in time is
modelled: equal stages, a backward takes twice as long as a forward, messages take no time.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import offbeat
from offbeat.methods import Method, PipeDream, Synchronous
from offbeat.records.ledger import Ledger
from offbeat.schedules.table import Action, Table

STAGES, BATCHES, SHOWN = 4, 12, 30.0
COSTS = {"F": 1.0, "B": 2.0, "U": 0.0}
COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#3fa7a0", "#d4a72c", "#9c755f"]
FRAMES, FRAME_MS, HOLD_MS = 40, 200, 4000
LOW, HIGH = 0.12, 0.62
"""Edges of a block below its stage's line; the arcs have the rest of the line."""


@dataclass(frozen=True)
class Block:
    """A forward or backward, and the version it reads or its gradient is applied to."""

    action: Action
    start: float
    end: float
    version: int

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


@dataclass(frozen=True)
class Run:
    """What happened, laid out in modelled time."""

    ledger: Ledger

    @cached_property
    def blocks(self) -> dict[Action, Block]:
        versions = {}
        for entry in self.ledger:
            if entry.kind == "F":
                versions[Action(entry.stage, "F", entry.batch)] = entry.version
            elif entry.kind == "U":  # one per batch: it writes the version after the one it changes
                versions[Action(entry.stage, "B", entry.batch)] = entry.version - 1
        orders: list[list[Action]] = [[] for _ in range(STAGES)]
        for entry in self.ledger:
            if entry.kind in ("F", "B", "U"):
                orders[entry.stage].append(Action(entry.stage, entry.kind, entry.batch))
        table = Table(tuple((tuple(order),) for order in orders))
        return {
            action: Block(action, start, end, versions[action])
            for action, start, end in table.walk(lambda action: COSTS[action.kind])
            if action.kind != "U" and start < SHOWN
        }

    def last_backward(self, stage: int, now: float) -> Block | None:
        """The latest that is done."""
        done = [
            block
            for action, block in self.blocks.items()
            if (action.stage, action.kind) == (stage, "B") and block.end <= now
        ]
        return max(done, key=lambda block: block.end, default=None)


def train(method: Method) -> Run:
    torch.manual_seed(0)
    trainer = offbeat.Trainer(
        [nn.Linear(8, 8) for _ in range(STAGES)],
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        method=method,
    )
    for _ in range(BATCHES):
        trainer.step(torch.randn(4, 8), torch.randn(4, 8))
    trainer.flush()
    return Run(trainer.ledger)


def tint(batch: int, white: float) -> tuple[float, float, float]:
    red, green, blue = (white + (1 - white) * c for c in to_rgb(COLOURS[batch % len(COLOURS)]))
    return red, green, blue


def draw(axes: Axes, name: str, run: Run, now: float) -> None:
    done = run.last_backward(0, now)
    count = 0 if done is None else done.action.batch + 1
    axes.set_title(
        f"{name}: {count} {'batch' if count == 1 else 'batches'} done",
        loc="left", fontsize=12, fontweight="bold", color="#222222", pad=3,
    )  # fmt: skip
    axes.set(xlim=(0, SHOWN), ylim=(STAGES - 0.3, -0.42))
    axes.set_yticks([k + (LOW + HIGH) / 2 for k in range(STAGES)])
    axes.set_yticklabels([f"stage {k}" for k in range(STAGES)], fontsize=10.5, color="#222222")
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.text(SHOWN + 1.3, -0.28, "lag", ha="center", fontsize=11, color="#222222")
    for stage in range(STAGES):
        axes.barh(stage + LOW, SHOWN, HIGH - LOW, align="edge", color="#ececec", zorder=0)
        last = run.last_backward(stage, now)
        if last is not None:
            draw_lag(axes, run, last)
    for block in run.blocks.values():
        if block.start < now:
            draw_block(axes, block, min(block.end, now, SHOWN))
    axes.axvline(now, ymin=0.02, ymax=0.92, color="#888888", linewidth=0.8)


def draw_block(axes: Axes, block: Block, end: float) -> None:
    stage, kind, batch, _ = block.action
    colour = tint(batch, 0.65 if kind == "F" else 0.2)
    axes.barh(
        stage + LOW, end - block.start - 0.06, HIGH - LOW, left=block.start + 0.03, align="edge",
        color=colour,
    )  # fmt: skip
    if block.middle + 0.4 < end:
        axes.text(
            block.middle, stage + (LOW + HIGH) / 2, f"v{block.version}",
            ha="center", va="center_baseline", fontsize=9.5, fontweight="bold",
            color="#111111",
        )  # fmt: skip


def draw_lag(axes: Axes, run: Run, backward: Block) -> None:
    """From the forward to the backward of a batch, and the ledger's lag beside the stage."""
    stage, _, batch, _ = backward.action
    forward = run.blocks[Action(stage, "F", batch)]
    way = np.linspace(0, np.pi, 40)
    middle, half = (forward.middle + backward.middle) / 2, (backward.middle - forward.middle) / 2
    axes.plot(
        middle - half * np.cos(way), stage + LOW - 0.34 * np.sin(way),
        color=tint(batch, 0.0), linewidth=2.2, solid_capstyle="round", clip_on=False,
    )  # fmt: skip
    axes.text(
        SHOWN + 1.3, stage + (LOW + HIGH) / 2, str(run.ledger.lags(stage)[batch]),
        ha="center", va="center_baseline", fontsize=15, fontweight="bold", color=tint(batch, 0.0),
    )  # fmt: skip


def picture(runs: Mapping[str, Run]) -> Callable[[float], Image.Image]:
    figure = Figure(figsize=(10, 5.7), dpi=120, facecolor="white")
    canvas = FigureCanvasAgg(figure)

    def at(now: float) -> Image.Image:
        figure.clear()
        for place, (name, run) in enumerate(runs.items()):
            axes = figure.add_axes((0.075, 0.545 - 0.455 * place, 0.85, 0.4))
            draw(axes, name, run, now)
        figure.text(
            0.5, 0.03,
            "light: forward, with the version it reads        "
            "dark: backward, with the version it changes        lag: the difference",
            ha="center", fontsize=11, color="#222222",
        )  # fmt: skip
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")

    return at


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the picture of the README.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--frames", type=int, default=FRAMES)
    arguments = parser.parse_args()
    at = picture(
        {
            "Plain training, a stage waits for all others": train(Synchronous()),
            "PipeDream, nobody waits once the pipe is full": train(PipeDream()),
        }
    )
    still = at(SHOWN)
    still.save(arguments.out / "lag.png", optimize=True)
    colours = still.quantize(96, dither=Image.Dither.NONE)  # the same in every frame: less to store
    moments = [SHOWN * (n + 1) / arguments.frames for n in range(arguments.frames)]
    frames = [at(now).quantize(palette=colours, dither=Image.Dither.NONE) for now in moments]
    frames[0].save(
        arguments.out / "lag.gif",
        save_all=True,
        append_images=frames[1:],
        duration=[FRAME_MS] * (len(frames) - 1) + [HOLD_MS],
        loop=0,
        optimize=True,  # stores what changes between frames
    )


if __name__ == "__main__":
    main()
