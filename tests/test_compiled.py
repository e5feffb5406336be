"""Stages through torch.compile: the same training, and a way back.

The backend here runs PyTorch's own kernels behind torch.compile's tracing and autograd, so that the
numbers can be compared and no compiler is needed.
"""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from helpers import assert_same_bits, cnn, image_batches, mlp, trained, trainer_for, vector_batches
from offbeat.errors import ConfigurationError
from offbeat.methods import DSP, PipeDream, StaleWeights

# torch.compile asks every input for .grad, and warns itself of those that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def penalty(named: Any) -> Any:
    return 1e-2 * sum(p.square().sum() for _, p in named)


@pytest.mark.parametrize(
    ("method", "how"),
    [(StaleWeights(), {}), (PipeDream(), {"penalty": penalty}), (DSP(), {})],
    ids=["stale-weights", "pipedream", "dsp"],
)
def test_compiled_stages_train_alike(method: Any, how: dict[str, Any]) -> None:
    """BatchNorm included: compiled code saves statistics that later batches change."""
    plain = trained(cnn(), image_batches(10), method, cuts=[3, 6], **how)
    ours = trained(cnn(), image_batches(10), method, cuts=[3, 6], compile=True, **how)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_every_stage_is_compiled_once() -> None:
    """Ten stages share the forward of nn.Sequential, and torch.compile gives up at eight."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(10)), nn.Linear(6, 4)).double()
    trained(model, vector_batches(16), PipeDream(), cuts=list(range(1, 10)), compile=True)
    assert counters["stats"]["unique_graphs"] == 10
    assert not counters["unimplemented"]


def put_double(layer: Any) -> None:
    layer.forward = MethodType(lambda layer, x: 2 * type(layer).forward(layer, x), layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(lambda _, __, output: 2 * output),
        lambda layer: layer.register_forward_pre_hook(lambda _, given: (2 * given[0],)),
        put_double,
        lambda layer: setattr(layer, "forward", lambda x: x.sin()),
    ],
)
def test_what_a_script_changes_is_compiled_anew(change: Any) -> None:
    results = []
    for compile in (True, False):
        trainer = trainer_for(mlp(), PipeDream(), cuts=[2, 4], compile=compile)
        for n, (x, y) in enumerate(vector_batches(8)):
            if n == 4:
                change(trainer.model.get_submodule("1"))
            trainer.step(x, y)
        trainer.flush()
        results.append(trainer.state_dict())
    assert_same_bits(*results)


def test_a_failing_compiler_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such instruction")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    with pytest.warns(UserWarning, match="stage 0 runs uncompiled, because torch.compile failed"):
        ours = trained(mlp(), vector_batches(4), compile=True, stages=1)
    plain = trained(mlp(), vector_batches(4), stages=1)
    assert_same_bits(ours.state_dict(), plain.state_dict())


def test_evaluation_and_export_use_the_module_as_it_is() -> None:
    model = cnn()
    trainer = trainer_for(copy.deepcopy(model), PipeDream(), cuts=[3, 6], compile=True)
    batches = image_batches(6)
    for x, y in batches:
        trainer.step(x, y)
    assert list(trainer.state_dict()) == list(model.state_dict())
    assert trainer.evaluate(batches).rows == 36


def test_casts_that_compiled_code_may_keep_are_refused_under_current() -> None:
    with pytest.raises(ConfigurationError, match="newest weights.*backward='stash'"):
        trainer_for(mlp(), StaleWeights(), stages=2, compile=True, autocast=torch.bfloat16)
    assert isinstance(
        trainer_for(mlp(), PipeDream(), stages=2, compile=True, autocast=torch.bfloat16),
        offbeat.Trainer,
    )
