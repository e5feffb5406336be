"""Draws the picture of the README: four methods over four stages, in modelled time.

python docs/timelines.py --out docs/timelines.png
"""

import argparse
from pathlib import Path

from offbeat.app.report import draw_timelines
from offbeat.methods import DSP, GPipe, Method, StaleWeights, Synchronous
from offbeat.schedules.timeline import timeline

STAGES = 4
METHODS: dict[str, Method] = {
    "Synchronous": Synchronous(),
    "GPipe, 4 micro-batches": GPipe(4),
    "StaleWeights": StaleWeights(),
    "DSP": DSP(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the picture of the README.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    out = parser.parse_args().out
    lines = {name: timeline(method, STAGES, steps=16) for name, method in METHODS.items()}
    figure = draw_timelines(
        lines,
        until=28,
        xlabel="time, in forwards of a batch at one stage (modelled: equal stages, free messages)",
    )
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
