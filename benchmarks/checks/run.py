"""What the checks of every step cost: training with them and without, by turns, in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.checks.run --out benchmarks/checks/results.jsonl

Checked in every step is what the first batch cannot decide: what a script has changed of the model,
what a loss depends on, whether a graph is one that was inspected, whether Python's or NumPy's
generators were drawn from, what blocks return and which buffers they write, what a mean was taken
over. For the turns without, these functions do nothing. Time is that of the processor, so that
others on the machine count less; steps of either kind take turns, and a row is a round of them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import offbeat
from offbeat.cutting import blocks
from offbeat.engines.means import Means
from offbeat.engines.models import Models
from offbeat.rng import HostState
from offbeat.stages import network
from offbeat.zoo import mlp, resnet

Batch = tuple[Any, Tensor]


class _Like:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class _Still:
    moved, whole = False, None


OFF: list[tuple[Any, str, Callable[..., Any]]] = [
    (Models, "follow", lambda *_: []),
    (Models, "remember", lambda *_: None),
    (network, "leaves_of", lambda *_: []),
    (HostState, "now", staticmethod(lambda **_: _Still)),
    (blocks, "_plain_of", lambda *_: _Like()),
    (blocks._Body, "_versions", lambda *_: []),
    (Means, "look_at", lambda *_: None),
]
"""The checks, and what stands in their place."""


@contextmanager
def unchecked() -> Iterator[None]:
    with ExitStack() as stack:
        for holder, name, instead in OFF:
            stack.enter_context(patch.object(holder, name, instead))
        yield


def language(kind: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, kind.partition("For")[0].removesuffix("LMHeadModel") + "Config")
    model: nn.Module = getattr(transformers, kind)(config(**settings))
    return model


def words(rows: int, length: int, *names: str) -> Batch:
    ids = torch.randint(3, 256, (rows, length))
    return dict.fromkeys(names, ids), ids


def next_word(output: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def digits(rows: int) -> Batch:
    return torch.randn(rows, 1, 28, 28), torch.randint(10, (rows,))


def images(rows: int) -> Batch:
    return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


GPT2 = {"vocab_size": 256, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128}
T5 = {"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
START = {"decoder_start_token_id": 0, "pad_token_id": 0}
MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor], Batch]]] = {
    "mlp": lambda: (
        mlp(), nn.functional.cross_entropy, digits(128),
    ),
    "resnet20": lambda: (resnet(20), nn.functional.cross_entropy, images(32)),
    "gpt2": lambda: (language("GPT2LMHeadModel", **GPT2), next_word, words(8, 64, "input_ids")),
    "t5": lambda: (
        language("T5ForConditionalGeneration", **T5, **START), next_word,
        words(8, 32, "input_ids", "decoder_input_ids"),
    ),
}  # fmt: skip
"""A chain, one with BatchNorm, blocks with a tied weight, a traced model with one."""
METHODS = {
    "stash": offbeat.PipeDream(),
    "current": offbeat.StaleWeights(),
    "recompute": offbeat.DSP(),
    "no lag": offbeat.Synchronous(),
}


def step(trainer: offbeat.Trainer, batch: Batch) -> float:
    began = time.process_time()
    trainer.step(*batch)
    return time.process_time() - began


def measure(model: str, method: str, rounds: int, least_s: float) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    made, loss, batch = MODELS[model]()
    trainer = offbeat.Trainer(
        made, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
        method=METHODS[method], stages=3,
    )  # fmt: skip
    for _ in range(12):  # the pipe is full, and whatever is learnt once is known
        took = step(trainer, batch)
    steps = max(2, round(least_s / took / 2))
    for number in range(rounds):
        times: dict[str, list[float]] = {"checked": [], "unchecked": []}
        for _ in range(steps):
            for kind, context in (("checked", nullcontext), ("unchecked", unchecked)):
                with context():
                    times[kind].append(step(trainer, batch))
        # Medians: a step in which the machine did something else says nothing of either.
        middle = {f"{kind}_s": median(found) for kind, found in times.items()}
        yield {"model": model, "method": method, "round": number, "steps": steps, **middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in arguments.only:
        for method in METHODS:
            own = list(measure(model, method, arguments.rounds, arguments.seconds))
            share = median(row["checked_s"] / row["unchecked_s"] - 1 for row in own)
            ms = 1e3 * median(row["unchecked_s"] for row in own)
            print(f"{model:10} {method:10} {share:7.2%} of a step of {ms:.1f} ms", flush=True)
            rows += own
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
