"""Every mistake in the constructor and the verbs is answered in words, never from inside.

A table of those that ended in another library's traceback, and hypothesis over their neighbours.
"""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offbeat
from offbeat.errors import OffbeatError
from offbeat.guards import Guards


def model_of(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), *more)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def trainer_of(**changed: Any) -> offbeat.Trainer:
    chosen: dict[str, Any] = {
        "model": model_of(),
        "loss": nn.functional.cross_entropy,
        "optimizer": sgd,
        "method": "dsp",
        "cuts": [2],
    }
    chosen |= changed
    return offbeat.Trainer(chosen.pop("model"), **chosen)


X, Y = torch.ones(4, 4), torch.zeros(4).long()
NONE: Any = None
TEXT: Any = "2"
BARE: Any = [X]
THREES: Any = [(X, Y, Y)]


def begun(steps: int = 3, **changed: Any) -> offbeat.Trainer:
    trainer = trainer_of(**changed)
    for _ in range(steps):
        trainer.step(X, Y)
    return trainer


def frozen() -> nn.Sequential:
    return model_of().requires_grad_(False)


def in_inference_mode(trainer: offbeat.Trainer) -> None:
    with torch.inference_mode():
        trainer.step(X, Y)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 4)


def nothing(*_: Any) -> None:
    """A function for launch()."""


def with_two_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)


def resumed(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    begun(**before).save(folder, wait=True)
    trainer_of(**after).resume(folder)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: trainer_of(model=None), "None: give an nn.Module or a list"),
    "a class": (lambda: trainer_of(model=nn.Linear), "Linear is a class.* Linear\\("),
    "a number": (lambda: trainer_of(model=3), "3: give an nn.Module or a list"),
    "faults": (lambda: trainer_of(faults="x"), "faults='x': give .*Faults"),
    "corrections": (lambda: trainer_of(corrections=3), "corrections=3: give a list"),
    "seed": (lambda: trainer_of(seed="x"), "seed='x': give a whole number"),
    "a broken seed": (lambda: trainer_of(seed=1.5), "seed=1.5: give a whole number"),
    "compile": (lambda: trainer_of(compile="x"), "compile='x': give True or False"),
    "engine": (lambda: trainer_of(engine=3), "unknown engine 3"),
    "frozen": (lambda: trainer_of(model=frozen()), "no weight.*requires_grad_"),
    "frozen, lag 0": (
        lambda: trainer_of(model=frozen(), method="synchronous"),
        "no weight.*requires_grad_",
    ),
    "loss without a graph": (
        lambda: begun(loss=lambda output, target: torch.tensor(1.0)),
        "loss.*does not depend on the output",
    ),
    "loss of a detached output": (
        lambda: begun(loss=lambda output, target: output.detach().mean(), method="synchronous"),
        "loss.*does not depend on the output",
    ),
    "inference mode": (lambda: in_inference_mode(trainer_of()), "inference_mode.* Leave"),
    "inference tensor": (lambda: trainer_of().step(made_in_inference_mode(), Y), "clone"),
    "evaluate [x]": (lambda: begun().evaluate(BARE), "evaluate.*pairs"),
    "evaluate x": (lambda: begun().evaluate(BARE[0]), "evaluate.*pairs"),
    "evaluate None": (lambda: begun().evaluate(NONE), "evaluate.*pairs"),
    "evaluate threes": (lambda: begun().evaluate(THREES), "evaluate.*pairs"),
    "batches None": (lambda: list(begun().batches(NONE)), "batches.*pairs"),
    "batches [x]": (lambda: list(begun().batches(BARE)), "batches.*pairs"),
    "launch '2'": (
        lambda: offbeat.launch(nothing, TEXT),
        "processes='2': give a whole number",
    ),
    "launch None": (lambda: offbeat.launch(NONE, 2), "function=None: give a function"),
    "launch threads": (lambda: offbeat.launch(nothing, 1, threads=0), "threads=0.*at least 1"),
    "launch time": (lambda: offbeat.launch(nothing, 1, timeout_s=-1), "timeout_s=-1.*seconds"),
    "load None": (lambda: begun(0).load_state_dict(NONE), "None.*state_dict\\(\\)"),
    "load nothing": (lambda: begun(0).load_state_dict({}), "0.weight"),
    "load strangers": (
        lambda: begun(0).load_state_dict({**model_of().state_dict(), "x": X}),
        "x.*missing in this model",
    ),
    "load shapes": (
        lambda: begun(0).load_state_dict({**model_of().state_dict(), "0.weight": X[:1]}),
        r"0.weight.*\(1, 4\).*\(6, 4\)",
    ),
    "load no tensor": (
        lambda: begun(0).load_state_dict({**model_of().state_dict(), "0.weight": 3}),
        "0.weight",
    ),
    "save None": (lambda: begun().save(NONE), "folder None: give a path"),
    "resume None": (lambda: begun().resume(NONE), "folder None: give a path"),
    "sampler": (lambda: begun().sampler(NONE, 4), "data=None: give what has a length"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_sentence(mistake: str) -> None:
    make, words = MISTAKES[mistake]
    with pytest.raises(OffbeatError, match=f"(?s){words}"):
        make()


RESUMPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "scheduler added": ({}, {"scheduler": falling}, "schedulers, in number 0.*with 1"),
    "scheduler removed": ({"scheduler": falling}, {}, "schedulers, in number 1.*with 0"),
    "groups": ({}, {"optimizer": with_two_groups}, r"parameter groups of \[2\].*\[1, 1\]"),
    "optimizer": ({}, {"optimizer": torch.optim.Adam}, "Adam"),
}


@pytest.mark.parametrize("case", RESUMPTIONS)
def test_an_exact_checkpoint_of_another_optimizer_is_refused(case: str, tmp_path: Path) -> None:
    before, after, words = RESUMPTIONS[case]
    begun(**before).save(tmp_path, wait=True)
    with pytest.raises(OffbeatError, match=words):
        trainer_of(**after).resume(tmp_path)


STRANGE: list[Any] = [
    None, 0, -1, 3, 1.5, math.nan, math.inf, "x", "", True, [], {}, (), [1], ("x",), object(),
    nn.Linear, torch.ones(2), torch.float16, Guards(), b"x", {"a": 1}, 10**30, -(10**30), [None],
]  # fmt: skip
ARGUMENTS = [
    "model", "loss", "optimizer", "method", "corrections", "monitor", "stages", "cuts", "ppv",
    "balance", "replicas", "averaging", "scheduler", "clip", "seed", "autocast", "guards", "engine",
    "compile", "timeout", "when_replica_dies", "faults", "weight",
]  # fmt: skip


def train(changed: dict[str, Any]) -> None:
    """Everything that a script does; compiling and drawing threads apart, which takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(**changed)
        for _ in range(2):
            trainer.step(X, Y)
        trainer.flush()
        trainer.evaluate([(X, Y)])


def foreign(call: Callable[..., Any], *arguments: Any) -> str | None:
    """The error of another library that comes out of a call, if one does."""
    try:
        call(*arguments)
    except OffbeatError:
        return None
    except Exception as error:
        theirs = (str(torch.nn.__path__[0]), str(torch.utils.__path__[0]))
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if any(name.startswith(theirs) for name in frames):  # in the model, the loss or the loader
            return None
        return f"{arguments[-1]!r}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_argument_ends_in_a_foreign_traceback(name: str) -> None:
    # Whether a class or a Guards() is a function is the user's own affair.
    given = [v for v in STRANGE if not (name == "compile" and v is True) and not callable(v)]
    assert not list(filter(None, (foreign(train, {name: value}) for value in given)))


PAIRS = st.dictionaries(
    st.sampled_from([name for name in ARGUMENTS if name != "compile"]),
    st.sampled_from([value for value in STRANGE if not callable(value)]),
    min_size=2,
    max_size=3,
)


@settings(max_examples=100)
@given(changed=PAIRS)
def test_no_two_arguments_end_in_a_foreign_traceback(changed: dict[str, Any]) -> None:
    assert foreign(train, changed) is None


VERBS: dict[str, Callable[[offbeat.Trainer, Any], Any]] = {
    "step x": lambda trainer, value: trainer.step(value, Y),
    "step y": lambda trainer, value: trainer.step(X, value),
    "evaluate": lambda trainer, value: trainer.evaluate(value),
    "evaluate of": lambda trainer, value: trainer.evaluate([(X, Y)], of=value),
    "evaluate x": lambda trainer, value: trainer.evaluate([(value, Y)]),
    "evaluate y": lambda trainer, value: trainer.evaluate([(X, value)]),
    "batches": lambda trainer, value: list(trainer.batches(value)),
    "sampler": lambda trainer, value: trainer.sampler(value, 2),
    "sampler rows": lambda trainer, value: trainer.sampler(8, value),
    "load": lambda trainer, value: trainer.load_state_dict(value),
    "check_batch": lambda trainer, value: trainer.check_batch(value, value),
    "probe": lambda trainer, value: trainer.probe(value, value),
    "stop_together": lambda trainer, value: trainer.stop_together(value),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_ends_in_a_foreign_traceback(verb: str) -> None:
    steps = 0 if verb == "load" else 1
    found = (foreign(functools.partial(VERBS[verb], begun(steps)), value) for value in STRANGE)
    assert not list(filter(None, found))
