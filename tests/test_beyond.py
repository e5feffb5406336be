"""A loss that looks beyond its arguments: what is not of its stage is refused, never trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat
from helpers import OPTIMIZERS, assert_same_bits, mlp, vector_batches
from offbeat.errors import StageError
from offbeat.methods import ADL, DGL, DSP, Method, PipeDream, StaleWeights, Synchronous

LossOf = Callable[[nn.Sequential], Callable[[Any, Any], Tensor]]
METHODS: list[Method] = [
    Synchronous(), PipeDream(), StaleWeights(), ADL(2), DSP(),
]  # fmt: skip


def penalty_on_all(model: nn.Sequential) -> Callable[[Any, Any], Tensor]:
    return lambda output, y: (
        cross_entropy(output, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())
    )


def penalty_on_last(model: Any) -> Callable[[Any, Any], Tensor]:
    return lambda output, y: cross_entropy(output, y) + 1e-3 * model[6].weight.square().sum()


def features_of(place: int, model: nn.Sequential) -> Callable[[Any, Any], Tensor]:
    """A loss that also looks at what a layer has returned."""
    seen: list[Tensor] = []
    model[place].register_forward_hook(lambda module, x, y: seen.append(y))
    return lambda output, y: cross_entropy(output, y) + 1e-2 * seen[-1].square().mean()


def weights_of_its_own(_: nn.Sequential) -> Callable[[Any, Any], Tensor]:
    scale = nn.Linear(4, 4).double()
    return lambda output, y: cross_entropy(scale(output), y)


def a_number_of_its_own(_: nn.Sequential) -> Callable[[Any, Any], Tensor]:
    temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)
    return lambda output, y: cross_entropy(output * temperature, y)


def a_teacher_with_a_graph(_: nn.Sequential) -> Callable[[Any, Any], Tensor]:
    teacher, x = mlp(seed=5), torch.ones(1, 6, dtype=torch.float64)
    return lambda output, y: cross_entropy(output, y) + (output - teacher(x)).square().mean()


REFUSED: dict[str, tuple[LossOf, str]] = {
    "penalty": (penalty_on_all, r"'\d\.(weight|bias)' of shape .*Trainer\(penalty="),
    "features": (lambda model: features_of(0, model), r"'0\.\w+' of shape .*return them"),
    "own weights": (weights_of_its_own, r"a trained tensor of shape .*into the last stage"),
    "own number": (a_number_of_its_own, r"a trained tensor of shape \(1,\)"),
    "teacher": (a_teacher_with_a_graph, r"a trained tensor of shape .*requires_grad_\(False\)"),
}


def run(model: nn.Sequential, loss: Any, method: Method, **settings: Any) -> offbeat.Trainer:
    """Over this very model, which the loss knows."""
    trainer = offbeat.Trainer(
        model, loss=loss, optimizer=OPTIMIZERS["momentum"], method=method, cuts=[2, 4], **settings
    )
    for x, y in vector_batches(7):
        trainer.step(x, y)
    trainer.flush()
    return trainer


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_of_the_last_stage_is_refused(kind: str, method: Method) -> None:
    model, (loss_of, words) = mlp(), REFUSED[kind]
    with pytest.raises(StageError, match=words):
        run(model, loss_of(model), method)


@pytest.mark.parametrize("loss_of", [penalty_on_last, lambda model: features_of(5, model)])
def test_what_is_of_the_last_stage_is_trained_as_ever(loss_of: LossOf) -> None:
    plain = mlp()
    steps, loss = OPTIMIZERS["momentum"](plain.parameters()), loss_of(plain)
    for x, y in vector_batches(7):
        steps.zero_grad()
        loss(plain(x), y).backward()
        steps.step()
    model = mlp()
    assert_same_bits(run(model, loss_of(model), Synchronous()).state_dict(), plain.state_dict())
    for method in METHODS[1:]:
        model = mlp()
        run(model, loss_of(model), method)


@pytest.mark.parametrize("deep", [False, True])
def test_a_loss_that_begins_to_look_beyond_is_refused_then(deep: bool) -> None:
    """A penalty that is switched on later; and a factor deep inside the loss's own graph."""
    model: Any = mlp()
    calls: list[int] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        calls.append(len(calls))
        if calls[-1] < 4:
            return cross_entropy(output, y)
        if deep:
            return cross_entropy(output * model[0].weight.mean(), y)
        value: Tensor = cross_entropy(output, y) + model[0].weight.square().sum()
        return value

    with pytest.raises(StageError, match=r"'0\.weight'"):
        run(model, loss, StaleWeights())
    assert len(calls) == 5


def test_every_replica_has_a_loss_of_its_own_weights() -> None:
    """The script's model is the first replica's: another's loss would pull at the wrong weights."""
    model = mlp()
    with pytest.raises(StageError, match="a trained tensor of shape"):
        run(model, penalty_on_last(model), Synchronous(), replicas=2)


def test_local_losses_are_looked_at_in_every_stage() -> None:
    model = mlp().float()
    loss = penalty_on_last(model)
    trainer = offbeat.Trainer(
        model, loss=loss, optimizer=OPTIMIZERS["sgd"], method=DGL(), cuts=[2, 4]
    )
    x, y = vector_batches(1, dtype=torch.float32)[0]
    with pytest.raises(StageError, match="'6.weight' .*no weight of stage 0"):
        trainer.step(x, y)


def test_targets_and_a_model_that_returns_its_loss_are_arguments() -> None:
    class WithLoss(nn.Module):
        def forward(self, given: Any) -> Any:
            return cross_entropy(given, given.argmax(1)), given

    stages = [*mlp().float(), WithLoss()]
    trainer = offbeat.Trainer(
        [nn.Sequential(*stages[:4]), nn.Sequential(*stages[4:])],
        loss=lambda output, y: output[0] + (output[1] - y).square().mean(),
        optimizer=OPTIMIZERS["sgd"],
        method="pipedream",
    )
    for x, _ in vector_batches(3, dtype=torch.float32):
        trainer.step(x, torch.zeros(6, 4, requires_grad=True))
    trainer.flush()


class Kept(nn.Module):
    """Sends what an earlier stage has computed along with what it computes itself."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, given: Any) -> Any:
        hidden, *features = given if isinstance(given, tuple) else (given,)
        return self.layers(hidden), *(features or [hidden])


def test_features_and_weights_of_the_loss_train_where_the_message_says() -> None:
    def build() -> list[nn.Module]:
        layers = list(mlp())
        stages: list[nn.Module] = [nn.Sequential(*layers[:2])]
        return [*stages, Kept(*layers[2:4]), Kept(*layers[4:], nn.Linear(4, 4).double())]

    def loss(output: Any, y: Tensor) -> Tensor:
        logits, features = output
        value: Tensor = cross_entropy(logits, y) + 1e-2 * features.square().mean()
        return value

    plain = nn.Sequential(*build())
    steps = OPTIMIZERS["momentum"](plain.parameters())
    for x, y in vector_batches(7):
        steps.zero_grad()
        loss(plain(x), y).backward()
        steps.step()
    trainer = offbeat.Trainer(build(), loss=loss, optimizer=OPTIMIZERS["momentum"])
    for x, y in vector_batches(7):
        trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), plain.state_dict())


def penalty_in_processes() -> None:
    model = mlp()
    run(model, penalty_on_all(model), StaleWeights())


def test_in_processes_the_words_are_the_same() -> None:
    with pytest.raises(StageError, match="another stage, which is no weight of stage 2.*penalty="):
        offbeat.launch(penalty_in_processes, 3, timeout_s=60)
