"""Processes that read the model between steps, as scripts do; importable, one call per process."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from helpers import OPTIMIZERS, Batch, cnn, image_batches
from jobs import Tower, job_of, tower, tower_batches
from offbeat.averaging import DaSGD
from offbeat.errors import IncompleteModel, OffbeatError


class Branches(nn.Module):
    """No chain of blocks: it has to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        early = torch.relu(self.stem(x))
        logits: Tensor = self.head(torch.relu(self.right(torch.relu(self.left(early)))) + early)
        return logits


def model_of(kind: str) -> tuple[Any, list[Batch], dict[str, Any]]:
    """What a script gives to a trainer of three stages, and how it is cut."""
    torch.manual_seed(0)
    if kind == "list":
        layers = list(cnn())
        parts = [nn.Sequential(*layers[a:b]) for a, b in ((0, 3), (3, 6), (6, None))]
        return parts, image_batches(4, rows=8), {}
    if kind == "tower":
        return tower(), tower_batches()[:4], {"cuts": ["blocks.1", "blocks.3"]}
    if kind == "traced":
        return Branches(), tower_batches()[:4], {"cuts": ["left", "right"]}
    network, batches = job_of("cnn")
    return network, batches[:4], {"stages": 3}


def trainer_of(model: Any, how: dict[str, Any], **settings: Any) -> offbeat.Trainer:
    """Over this very model, as a script has it."""
    usual = {"method": offbeat.StaleWeights(), "loss": nn.functional.cross_entropy, "seed": 3}
    return offbeat.Trainer(model, optimizer=OPTIMIZERS["momentum"], **{**usual, **how, **settings})


def whole_of(model: Any) -> nn.Module:
    return model if isinstance(model, nn.Module) else nn.Sequential(*model)


def ones_for(model: nn.Module) -> dict[str, Tensor]:
    entries = model.state_dict(keep_vars=True)
    return {name: torch.ones(t.shape, dtype=t.dtype) for name, t in entries.items()}


READS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "state_dict": lambda model, x: model.state_dict(),
    "deepcopy": lambda model, x: copy.deepcopy(model),
    "call": lambda model, x: model.eval()(x),
    "torch.save": lambda model, x: torch.save(model, io.BytesIO()),
    "pickle": lambda model, x: pickle.dumps(model),
    "EMA": lambda model, x: torch.optim.swa_utils.AveragedModel(model),
    "EMA by hand": lambda model, x: [torch.zeros_like(p.detach()) for p in model.parameters()],
    "one vector": lambda model, x: nn.utils.parameters_to_vector(model.parameters()),
    "all buffers": lambda model, x: [buffer + 0 for buffer in model.buffers()],
    "numpy": lambda model, x: [p.data.numpy() for p in model.parameters()],
    "lerp": lambda model, x: [torch.ones(p.shape).lerp_(p, 0.5) for p in model.parameters()],
}
ASKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "print": lambda model, x: repr(model),
    "names": lambda model, x: [name for name, _ in model.named_parameters()],
    "count": lambda model, x: sum(p.numel() for p in model.parameters() if p.requires_grad),
    "shapes": lambda model, x: [(p.shape, p.dtype, p.device) for p in model.parameters()],
    "modes": lambda model, x: model.eval().train().training,
    "gradients": lambda model, x: [model.requires_grad_(), [p.grad for p in model.parameters()]],
    "kinds": lambda model, x: [isinstance(p, nn.Parameter) for p in model.parameters()],
    "in place": lambda model, x: [p.detach_().requires_grad_() for p in model.parameters()],
    "with other weights": lambda model, x: torch.func.functional_call(
        model.eval(), ones_for(model), (x,)
    ),
}


def tried(model: nn.Module, x: Tensor) -> dict[str, str]:
    """What each way to read or to ask says: "" where it answers."""
    said = {}
    for name, read in {**READS, **ASKS}.items():
        try:
            read(model, x)
            said[name] = ""
        except OffbeatError as error:
            said[name] = str(error)
        model.train()
    return said


def read_between_steps(kind: str) -> dict[str, Any]:
    model, batches, how = model_of(kind)
    trainer = trainer_of(model, how)
    whole, x = whole_of(model), batches[0][0]
    said = {"start": tried(whole, x)}
    for number, (xs, ys) in enumerate(trainer.batches(batches)):
        trainer.step(xs, ys)
        if number == 1:
            said["step"] = tried(whole, x)
            assert trainer.gather() is trainer.model
            said["gathered"] = tried(whole, x)
    said["next step"] = tried(whole, x)
    trainer.gather()
    trainer.flush()
    said["flush"] = tried(whole, x)
    state = trainer.state_dict()
    trainer.gather()
    return {"said": said, "state": state, "gathered": copy.deepcopy(whole).state_dict()}


def read_after_loading(folder: str) -> dict[str, dict[str, str]]:
    """A state for all is whole; what each process reads of its own stage alone is not."""
    said = {}
    for kind, drain in (("exact", False), ("drained", True)):
        model, batches, how = model_of("sequential")
        trainer = trainer_of(model, how)
        for x, y in trainer.batches(batches):
            trainer.step(x, y)
        trainer.save(Path(folder) / kind, drain=drain, wait=True)
        other, _, how = model_of("sequential")
        again = trainer_of(other, how)
        again.step(*batches[0])
        assert again.resume(Path(folder) / kind).kind == kind
        said[kind] = tried(other, batches[0][0])
        again.step(*batches[0])
        again.flush()
        again.load_state_dict(again.state_dict())
        said[f"{kind}, loaded"] = tried(other, batches[0][0])
    return said


def train_frozen() -> dict[str, Any]:
    """Only the last stage trains: nothing elsewhere changes, unless it is the first's process."""
    network, batches = job_of("dropout")
    for parameter in network[:6].parameters():
        parameter.requires_grad_(False)
    trainer = trainer_of(network, {"cuts": [3, 6]})
    for x, y in trainer.batches(batches):
        trainer.step(x, y)
    return tried(network, batches[0][0])


def gather_replicas() -> tuple[dict[str, Any], dict[str, Any]]:
    network, batches = job_of("cnn")
    trainer = trainer_of(network, {"cuts": [4]}, replicas=2, averaging=DaSGD(3, 1))
    for x, y in trainer.batches(batches[:4]):
        trainer.step(x, y)
    mean = trainer.state_dict()
    return mean, copy.deepcopy(trainer.gather().state_dict())


class Growing(nn.Module):
    seen: Tensor

    """Its buffers get other sizes with the batches: a cache, and one that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(0), persistent=False)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().sum().view(1)])
        self.last = x.detach().mean(1)
        moved: Tensor = self.linear(x)
        return moved


def gather_what_grows() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    stages = [Growing(), Growing(), nn.Linear(6, 4)]
    trainer = trainer_of(stages, {})
    for x, y in trainer.batches(tower_batches()[:4]):
        trainer.step(x, y)
    own = [b.clone() for b in stages[trainer.rank].buffers()]
    trainer.gather()
    return own, [b.clone() for stage in stages for b in stage.buffers()]


def wrap() -> tuple[str, list[int]]:
    """DistributedDataParallel reads the model when it is built: in all processes, or in none."""
    from torch.nn.parallel import DistributedDataParallel

    model, batches, how = model_of("tower")
    trainer = trainer_of(model, how)
    for x, y in trainer.batches(batches):
        trainer.step(x, y)
    said = ""
    try:
        DistributedDataParallel(model)
    except OffbeatError as error:
        said = str(error)
    output = DistributedDataParallel(trainer.gather())(batches[0][0])
    return said, list(output.shape)


class Pretrained(Tower):
    """Writes itself as models of transformers do; says whether it was in training."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")


def pretrained_of(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    torch.manual_seed(0)
    if kind == "own":
        return Pretrained(), tower_batches()[:4], {"cuts": ["blocks.2"]}
    import transformers

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=4, n_head=2, tie_word_embeddings=False
    )
    ids = torch.randint(32, (4, 8, 9))
    batches = [({"input_ids": one[:, :-1]}, one[:, 1:]) for one in ids]
    how = {"cuts": ["transformer.h.2"], "loss": loss_of_tokens}
    return transformers.GPT2LMHeadModel(config), batches, how


def loss_of_tokens(output: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def save_pretrained(kind: str, folder: str, replicas: int = 1) -> dict[str, Any]:
    model, batches, how = pretrained_of(kind)
    more: dict[str, Any] = {}
    if replicas > 1:
        more = {"replicas": replicas, "averaging": DaSGD(3, 1)}
    trainer = trainer_of(model, how, **more)
    for x, y in trainer.batches(batches):
        trainer.step(x, y)
    if trainer.mesh_size > trainer.replicas:
        with pytest.raises(IncompleteModel):
            model.save_pretrained(Path(folder) / f"early {trainer.rank}")  # type: ignore[operator]
    before = trainer.gather().state_dict()
    before = {name: value.clone() for name, value in before.items()}
    trainer.save_pretrained(Path(folder) / kind)
    after = trainer.gather().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    return trainer.state_dict()
