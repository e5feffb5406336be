"""Cases in which stages side by side on a GPU must give the bits of the serial engine.

The four papers' pipelines and what a real run needs: dropout, clipping, schedules of the learning
rate, mixed precision, accumulation, other optimizers, short batches, evaluation between, runs that
are saved and resumed. ``test_bits.py`` holds every case; ``python -m benchmarks.one_gpu.bits``
prints what was compared. Whatever joins METHODS or CORRECTIONS gets its cases by itself.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.corrections import CORRECTIONS, ClipPerStage, Rewind
from offbeat.methods import ADL, DSP, METHODS, Method, Phases, PipeDream, StaleWeights, Synchronous
from offbeat.zoo import gpt, resnet

ROWS = 32
STAGES = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    method: Method
    optimizer: Callable[[Any], Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "resnet"
    channels_last: bool = False
    short: bool = False
    resumed_at: int | None = None
    """Saved there with streams, and resumed by another trainer."""
    updates: int = 200
    change: Callable[[nn.Sequential], Any] | None = None
    """What the script does to the model in the middle, between two replays."""
    unrecorded: tuple[int, ...] = ()
    """The stages that cannot be recorded as CUDA graphs."""

    def __str__(self) -> str:
        return self.name


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4)


def sgd_on_device(params: Any) -> Any:
    lr = torch.tensor(0.05, device="cuda")
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=5e-4, fused=True)


def adamw_on_device(params: Any) -> Any:
    lr = torch.tensor(1e-3, device="cuda")
    return torch.optim.AdamW(params, lr=lr, capturable=True)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=1e-3, capturable=True)


def adam_on_host(params: Any) -> Any:
    return torch.optim.Adam(params, lr=1e-3)


def muon(params: Any) -> list[Any]:
    params = list(params)
    matrices = [p for p in params if p.ndim == 2]
    others = [p for p in params if p.ndim != 2]
    optimizers: list[Any] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=0.005))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=1e-3, capturable=True))
    return optimizers


def warm_up(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 50) / (1 + n / 100))


def drop_less(model: nn.Sequential) -> None:
    next(m for m in model if isinstance(m, nn.Dropout)).p = 0.5


def halved(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) * 0.5


def patch_head(model: nn.Sequential) -> None:
    model[-1].forward = MethodType(halved, model[-1])


def hook_head(model: nn.Sequential) -> None:
    model[-1].register_forward_hook(lambda module, x, output: output * 0.5)


BF16 = {"autocast": torch.bfloat16}
ALONE = [
    ClipPerStage(times=2.0) if kind is ClipPerStage else kind()
    for kind in CORRECTIONS
    if kind is not Rewind  # which needs another rule
]
CASES = [
    Case(name="stale weights", method=StaleWeights()),
    Case(name="pipedream", method=PipeDream()),
    Case(name="adl", method=ADL(accumulate=4)),
    Case(name="dsp", method=DSP()),
    Case(name="lag K-1-k, newest weights", method=PipeDream(backward="current")),
    Case(name="bf16, newest weights", method=StaleWeights(), settings=BF16, channels_last=True),
    Case(name="bf16, stash", method=PipeDream(), settings=BF16, channels_last=True),
    Case(name="bf16, recompute", method=DSP(), settings=BF16, channels_last=True),
    Case(
        name="schedule on the device, clip",
        method=StaleWeights(),
        optimizer=sgd_on_device,
        settings={"scheduler": warm_up, "clip": 1.0},
    ),
    Case(
        name="schedule on the host", method=StaleWeights(), settings={"scheduler": warm_up}
    ),
    Case(
        name="AdamW, schedule, accumulation, clip",
        method=PipeDream(accumulate=2),
        optimizer=adamw_on_device,
        settings={"scheduler": warm_up, "clip": 1.0},
    ),
    Case(name="Adam", method=StaleWeights(), optimizer=adam),
    Case(name="Adam that counts on the host", method=StaleWeights(), optimizer=adam_on_host),
    Case(name="Muon, transformer, bf16", method=PipeDream(), optimizer=muon, model="gpt",
         settings=BF16),
    Case(name="transformer, newest weights", method=StaleWeights(), optimizer=adam, model="gpt"),
    Case(name="a layer that asks the CPU", method=PipeDream(), model="asks the CPU",
         unrecorded=(1,)),
    Case(name="tied, stash", method=PipeDream(), model="tied", updates=60),
    Case(name="tied, newest weights", method=StaleWeights(accumulate=2), model="tied", updates=60),
    Case(name="an attribute is changed", method=PipeDream(), change=drop_less, updates=60),
    Case(name="a forward is patched", method=StaleWeights(), change=patch_head, updates=60),
    Case(name="a hook is put on", method=PipeDream(), change=hook_head, updates=60,
         unrecorded=(STAGES - 1,)),
    Case(name="short last batches", method=StaleWeights(accumulate=2), short=True),
    Case(
        name="hybrid",
        method=Phases((StaleWeights(), 60), (PipeDream(), 60), (Synchronous(), None)),
        settings={"clip": 2.0},
    ),
    *(
        Case(
            name=f"with {correction.name}",
            method=PipeDream(accumulate=2),
            settings={"corrections": [correction], "scheduler": warm_up},
            updates=60,
        )
        for correction in ALONE
    ),
    *(
        Case(
            name=f"with {correction.name}, recorded",  # where its numbers stay the same
            method=PipeDream(),
            optimizer=adamw_on_device if correction.name == "extrapolate" else sgd_on_device,
            settings={"corrections": [correction], "scheduler": warm_up},
            updates=80,
        )
        for correction in ALONE
    ),
    *(
        Case(name=f"{method.name}, saved and resumed", method=method, resumed_at=50, updates=100)
        for method in (StaleWeights(), PipeDream(), ADL(accumulate=4), DSP())
    ),
    Case(
        name="bf16, prediction, saved and resumed",
        method=PipeDream(),
        settings={"corrections": ["predict"], **BF16},
        channels_last=True,
        resumed_at=50,
        updates=100,
    ),
    Case(
        name="with rewind", method=StaleWeights(), settings={"corrections": ["rewind"]}, updates=60
    ),
    Case(
        name="bf16, prediction and spike compensation",
        method=StaleWeights(backward="stash"),
        settings={"corrections": ["predict", "spike-compensation"], **BF16},
        channels_last=True,
    ),
    *(
        Case(name=f"{method.name}, briefly", method=method(), updates=40)
        for method in METHODS
        if method not in (StaleWeights, PipeDream, ADL, DSP)
    ),
]  # fmt: skip


class Asking(nn.Module):
    """Cannot be recorded: the CPU waits for a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.abs().max().item() < 1e6 else x.clamp(-1e6, 1e6)


def model_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    if case.model == "gpt":
        return gpt(64, context=32, layers=4, width=64, heads=4, dropout=0.1).cuda()
    if case.model == "tied":
        wide = [nn.Linear(64, 64) for _ in range(5)]
        wide[-1].weight = wide[0].weight
        layers = [layer for one in wide for layer in (one, nn.Tanh())]
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), *layers, nn.Linear(64, 10)).cuda()
    net = resnet(14)
    if case.model == "asks the CPU":
        net.insert(5, Asking())
    model = nn.Sequential(*list(net)[:-1], nn.Dropout(0.1), net[-1]).cuda()
    if case.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for number in range(case.updates):
        rows = 20 if case.short and number % 9 == 8 else ROWS
        if case.model == "gpt":
            x = torch.randint(64, (rows, 32), generator=generator)
            y = torch.randint(64, (rows, 32), generator=generator)
        else:
            x = torch.randn(rows, 3, 32, 32, generator=generator)
            y = torch.randint(10, (rows,), generator=generator)
        x = x.cuda()
        if case.channels_last:
            x = x.to(memory_format=torch.channels_last)
        batches.append((x, y.cuda()))
    return batches


def loss_of(case: Case) -> Any:
    if case.model == "gpt":
        return lambda logits, tokens: F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return F.cross_entropy


def trainer_of(case: Case, engine: Any) -> offbeat.Trainer:
    return offbeat.Trainer(
        model_of(case),
        loss=loss_of(case),
        optimizer=case.optimizer or sgd,
        method=case.method,
        stages=STAGES,
        seed=1,
        engine=engine,
        **case.settings,
    )


def resume_elsewhere(trainer: offbeat.Trainer, case: Case) -> offbeat.Trainer:
    """Another trainer that goes on where this one is."""
    with TemporaryDirectory() as folder:
        trainer.save(folder, wait=True)
        another = trainer_of(case, "streams")
        another.resume(folder)
    return another


def train(case: Case, engine: Any) -> dict[str, Any]:
    trainer = trainer_of(case, engine)
    batches = batches_of(case)
    losses: list[Tensor | None] = []
    scores = []
    start = time.perf_counter()
    for number, (x, y) in enumerate(batches):
        if number == case.resumed_at and engine == "streams":
            trainer = resume_elsewhere(trainer, case)
        if case.change is not None and number == case.updates // 2:
            case.change(trainer.model)  # type: ignore[arg-type]
        losses.append(trainer.step(x, y))
        if number % 50 == 49:
            scores.append(trainer.evaluate(batches[:2]).loss)
    losses += trainer.flush()
    ledger = trainer.ledger
    return {
        "losses": [None if loss is None else float(loss) for loss in losses],
        "recorded losses": ledger.losses(STAGES - 1),
        "scores": scores,
        "lags": [ledger.lags(stage) for stage in range(STAGES)],
        "state": {name: value.cpu() for name, value in trainer.state_dict().items()},
        "seconds": time.perf_counter() - start,
    }


NUMBERS = ("losses", "recorded losses", "scores", "lags")
"""What must be the same beside the weights and buffers."""


def differing(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Elements of the state whose bits differ; nan equals nothing, so a nan counts."""
    return sum(int((value != other[name]).sum()) for name, value in one.items())


def compare(case: Case) -> dict[str, Any]:
    """Trains with both engines; one row of what was compared, ready to be stored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        serial, streams = train(case, "serial"), train(case, "streams")
    messages = sorted({str(w.message) for w in caught if w.category is UserWarning})
    unrecorded = re.findall(r"stage (\d+) runs unrecorded", "\n".join(messages))
    return {
        "case": case.name,
        "method": str(case.method),
        "updates": case.updates,
        "differing elements": differing(serial["state"], streams["state"]),
        "elements": sum(value.numel() for value in streams["state"].values()),
        "also the same": [key for key in NUMBERS if serial[key] == streams[key]],
        "stages that could not be recorded": sorted(map(int, unrecorded)),
        "seconds": {"serial": serial["seconds"], "streams": streams["seconds"]},
        "messages": messages,
    }
