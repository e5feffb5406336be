"""Other people's models as they come, each against a plain loop and against its oracles."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
import oracles
from architectures import EVERY, Architecture
from helpers import OPTIMIZERS, assert_same_bits
from offbeat.errors import OffbeatError

pytestmark = pytest.mark.filterwarnings("default")  # what other people's code warns of is its own

PAGE = Path(__file__).parent.parent / "docs" / "your-own-model.md"

QUICK = {
    "gpt2",
    "gpt2-tied",
    "t5-tied",
    "llama",
    "mixtral",
    "bert",
    "vit",
    "gemma2",
    "t5",
    "dit",
    "exits",
    "handed-weight",
    "shared-block",
}
"""Those that the suite tries each time; the others are long."""


@cache
def refused() -> dict[str, tuple[str, str]]:
    """By architecture and method what the page says: the trainer's sentence, and the way out."""
    head = "| architecture | method | what the trainer says | instead |\n"
    _, _, table = PAGE.read_text().partition(head)
    table, _, _ = table.partition("\n\n")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {
        f"{name} {method}": (sentence, way_out)
        for names, methods, sentence, way_out in rows
        for name in names.split(", ")
        for method in methods.split(", ")
    }


def call(model: nn.Module, x: Any) -> Any:
    names = inspect.signature(model.forward).parameters
    settings = {"use_cache": False} if "use_cache" in names else {}
    return model(**x, **settings) if isinstance(x, dict) else model(x, **settings)


def trained(case: Architecture, method: str, **settings: Any) -> offbeat.Trainer:
    trainer = offbeat.Trainer(
        case.make(), loss=case.loss, optimizer=OPTIMIZERS["momentum"], method=method,
        **{**case.settings, **settings},
    )  # fmt: skip
    for x, y in case.batches():
        trainer.step(x, y)
    trainer.flush()
    return trainer


def plain(case: Architecture) -> nn.Module:
    model = case.make()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for x, y in case.batches():
        optimizer.zero_grad()
        case.loss(call(model, x), y).backward()
        optimizer.step()
    return model


def oracle(case: Architecture, method: str, trainer: offbeat.Trainer) -> nn.Module:
    """What the method's equation gives for the trainer's stages."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    stages = [[names[id(p)] for p in w.stage.parameters] for w in trainer._engine.workers]
    rule, ways = {"pipedream": ("stash", 1), "stale-weights": ("current", 2)}[method]
    lags = [ways * (len(stages) - 1 - k) for k in range(len(stages))]
    return oracles.whole(
        rule, case.make(), stages, case.batches(), case.loss, OPTIMIZERS["momentum"], lags, call
    )


METHODS = ["synchronous", "pipedream", "stale-weights"]
TIED = {"handed-weight", "t5", "gpt2-tied", "llama-tied", "bert-tied", "t5-tied", "bart-tied"}
"""Weights that several stages use. Under "current" a late backward sees what came with its batch,
as tie_oracle.py says, where this oracle knows one value of a weight."""
WAYS_OUT = {
    "shared-block": replace(EVERY["shared-block"], settings={"stages": 2}),
}


def case_of(name: str, *more: str) -> Any:
    return pytest.param(name, *more, marks=[] if name in QUICK else pytest.mark.long)


CASES = [
    case_of(name, method)
    for name in EVERY
    for method in METHODS
    if f"{name} {method}" not in refused()
    and f"{name} all" not in refused()
    and not (name in TIED and method == "stale-weights")
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_an_architecture_ends_with_the_bits_of_its_oracle(name: str, method: str) -> None:
    case = EVERY[name]
    found = trained(case, method)
    synchronous = method == "synchronous"
    expected = plain(case) if synchronous else oracle(case, method, found)
    assert found.stages == case.settings.get("stages", 3)
    assert all(worker.stage.trainable for worker in found._engine.workers)
    state: dict[str, Tensor] = found.state_dict()
    assert_same_bits(state, dict(expected.state_dict()))
    assert not all(map(torch.equal, state.values(), case.make().state_dict().values()))
    if synchronous:
        batches = case.batches()
        expected.eval()
        with torch.no_grad():
            losses = [float(case.loss(call(expected, x), y)) * len(y) for x, y in batches]
        mean = sum(losses) / sum(len(y) for _, y in batches)
        assert found.evaluate(batches).loss == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(("name", "method"), [case_of(*key.split(" ")) for key in refused()])
def test_an_architecture_is_refused_in_the_words_of_the_page(name: str, method: str) -> None:
    with pytest.raises(OffbeatError) as caught:
        trained(EVERY[name], "synchronous" if method == "all" else method)
    sentence, _ = refused()[f"{name} {method}"]
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("name", "method"), [case_of(*key.split(" ")) for key in refused()])
def test_the_way_out_is_one(name: str, method: str) -> None:
    if method == "all":
        assert_same_bits(
            trained(WAYS_OUT[name], "synchronous").state_dict(),
            dict(plain(WAYS_OUT[name]).state_dict()),
        )
    else:
        trained(EVERY[name], "dsp")


def train_all(names: list[str]) -> list[dict[str, Tensor]]:
    return [trained(EVERY[name], "pipedream").state_dict() for name in names]


THREE = sorted(
    {str(c.values[0]) for c in CASES if EVERY[str(c.values[0])].settings.get("stages", 3) == 3}
)


@pytest.mark.parametrize("names", [["dit", "exits"], pytest.param(THREE, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_processes_end_with_the_bits_of_one(names: list[str]) -> None:
    expected = train_all(names)
    for states in offbeat.launch(train_all, 3, names):
        for state, theirs in zip(states, expected, strict=True):
            assert_same_bits(state, theirs)
