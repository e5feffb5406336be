"""Memory of StaleWeights and PipeDream over plain training, measured and counted as published.

PYTHONPATH=src python -m benchmarks.claims.memory --out benchmarks/claims/memory.json
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import offbeat
from offbeat.methods import Method
from offbeat.stages.memory import Storages
from offbeat.zoo import network

BATCH = 128
MIB = 2**20
METHODS: dict[str, Method] = {
    "PipeDream": offbeat.PipeDream(),
    "StaleWeights": offbeat.StaleWeights(),
    "StaleWeights, stashed": offbeat.StaleWeights(backward="stash"),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the paper's Table 9: four-stage training, its 2 x (1 + one pair of registers)."""

    activations_mib: float
    """For one image."""
    weights_mib: float
    pipedream_percent: int
    stale_weights_percent: int


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    ppv: tuple[int, ...]
    image: tuple[int, int, int]
    published: Published


CASES: dict[str, Case] = {
    "LeNet-5": Case(
        model="lenet5",
        ppv=(2,),
        image=(1, 28, 28),
        published=Published(
            activations_mib=0.06, weights_mib=0.24, pipedream_percent=109, stale_weights_percent=97
        ),
    ),
    "AlexNet": Case(
        model="alexnet",
        ppv=(3,),
        image=(3, 32, 32),
        published=Published(
            activations_mib=0.88, weights_mib=88.87, pipedream_percent=214, stale_weights_percent=37
        ),
    ),
    "VGG-16": Case(
        model="vgg16",
        ppv=(2,),
        image=(3, 32, 32),
        published=Published(
            activations_mib=3.30, weights_mib=58.16, pipedream_percent=124, stale_weights_percent=75
        ),
    ),
    "ResNet-20": Case(
        model="resnet20",
        ppv=(7,),
        image=(3, 32, 32),
        published=Published(
            activations_mib=3.84, weights_mib=1.03, pipedream_percent=61, stale_weights_percent=60
        ),
    ),
}


def random_batch(case: Case) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, *case.image), torch.randint(10, (BATCH,))


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# ---------------------------------------------------------------- measured


def graph_bytes(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """What the graph of one batch of plain training holds besides the weights."""
    parameters = list(model.parameters())
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(x), y)
    storages = Storages(parameters)
    storages.add_tensors(saved)
    del loss  # until here it held the graph
    return storages.other_bytes


def measure(case: Case, method: Method) -> dict[str, Any]:
    """What a pipeline holds between two steps when it is full, from ``trainer.memory()``."""
    trainer = offbeat.Trainer(
        network(case.model),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        method=method,
        ppv=case.ppv,
    )
    for _ in range(trainer.lags[0] + 2):
        trainer.step(*random_batch(case))
    return {"lags": trainer.lags, "stages": [asdict(stage) for stage in trainer.memory()]}


def measured(case: Case) -> dict[str, Any]:
    """Bytes of plain training, and what each method holds in addition, in percent of them.

    In any method each stage works on one batch: all stages together hold one whole graph, as plain
    training does at its peak. What waits between steps comes on top of that.
    """
    model = network(case.model)
    weights = bytes_of(list(model.parameters()))
    graph = graph_bytes(model, *random_batch(case))
    row: dict[str, Any] = {"weight_bytes": weights, "graph_bytes": graph}
    for name, method in METHODS.items():
        found = measure(case, method)
        found["extra_weight_bytes"] = sum(s["weight_bytes"] for s in found["stages"]) - weights
        found["extra_activation_bytes"] = sum(s["in_flight_bytes"] for s in found["stages"])
        extra = found["extra_weight_bytes"] + found["extra_activation_bytes"]
        found["percent"] = round(100 * extra / (weights + graph), 1)
        row[name] = found
    return row


# ---------------------------------------------------------------- counted as published


def output_bytes(model: nn.Sequential, x: Tensor) -> list[int]:
    """Per child of the model: outputs of all its layers, as torchsummary's tables count them."""
    counts = []
    for child in model:
        outputs: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _module, _given, out, to=outputs: to.append(out))
            for module in child.modules()
        ]
        x = child(x)
        for hook in hooks:
            hook.remove()
        counts.append(bytes_of(outputs))
    return counts


def first_children(model: nn.Sequential, layers: int) -> int:
    """How many children hold this many weighted layers and what follows without weights."""
    seen = 0
    for index, child in enumerate(model):
        here = sum(isinstance(m, nn.Conv2d | nn.Linear) for m in child.modules())
        if here and seen >= layers:
            return index
        seen += here
    return len(model)


def counted(case: Case, layers: int) -> dict[str, float]:
    """The published accounting on our networks, with the register behind this many layers.

    Plain training: weights, and every layer's output with its gradient. StaleWeights: two more
    batches of outputs in the first stage. PipeDream: that, and four more copies of all weights.
    """
    model = network(case.model)
    outputs = output_bytes(model, torch.randn(1, *case.image))
    weights = bytes_of(list(model.parameters()))
    plain = weights + 2 * BATCH * sum(outputs)
    waiting = 2 * BATCH * sum(outputs[: first_children(model, layers)])
    return {
        "activations_mib": round(2 * sum(outputs) / MIB, 3),
        "weights_mib": round(weights / MIB, 2),
        "pipedream_percent": round(100 * (waiting + 4 * weights) / plain, 1),
        "stale_weights_percent": round(100 * waiting / plain, 1),
    }


def copies_between(published: Published) -> float:
    """Weight copies by which the two published numbers of a row differ."""
    plain = BATCH * published.activations_mib + published.weights_mib
    percent = published.pipedream_percent - published.stale_weights_percent
    return percent / 100 * plain / published.weights_mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, Any] = {"batch": BATCH, "torch": torch.__version__, "networks": {}}
    print(f"| network | published | counted as published | {' | '.join(METHODS)} |")
    for name, case in CASES.items():
        row: dict[str, Any] = {
            "published": asdict(case.published),
            "copies_between_published": round(copies_between(case.published), 2),
            "counted": counted(case, case.ppv[0]),
            "measured": measured(case),
        }
        if name == "VGG-16":
            row["counted_with_register_behind_6"] = counted(case, 6)
        result["networks"][name] = row
        pairs = [
            f"{row[how]['pipedream_percent']} / {row[how]['stale_weights_percent']}"
            for how in ("published", "counted")
        ]
        cells = pairs + [f"{row['measured'][method]['percent']}" for method in METHODS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
