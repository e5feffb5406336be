"""benchmarks/accuracy trains many networks as one; each has to learn what it would learn alone."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat
from offbeat.stages.network import Loss
from offbeat.zoo import resnet

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.accuracy import convolutions, norms
from benchmarks.accuracy.ensemble import GroupedNorm, ensemble, side_by_side, summed_loss

SEEDS = (3, 5, 8)
STEPS = 6


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(10, (8,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def trained(model: nn.Module, loss: Loss, data: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    trainer = offbeat.Trainer(
        model.double(),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4),
        method=offbeat.PipeDream(accumulate=2),
        corrections=["predict"],
        cuts=[4, 5],  # counting does not know an ensemble's operator
        seed=0,
    )
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    return trainer.model.eval()


def test_each_network_of_an_ensemble_learns_what_it_learns_alone() -> None:
    together = [
        (
            side_by_side([x for x, _ in step]),
            torch.stack([y for _, y in step], dim=1),
        )
        for step in zip(*map(batches, SEEDS), strict=True)
    ]
    whole = trained(ensemble(partial(resnet, 8), SEEDS), summed_loss, together)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = whole(side_by_side([x] * len(SEEDS)))
        for place, seed in enumerate(SEEDS):
            torch.manual_seed(seed)
            alone = trained(resnet(8), F.cross_entropy, batches(seed))
            torch.testing.assert_close(found[:, place], alone(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_ensemble_s_convolutions_are_what_compilers_are_told(stride: int) -> None:
    """Shapes, layouts and gradients of both, also where the input lies otherwise."""
    x = torch.randn(2, 3 * 4, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    for images in (x, x.detach().to(memory_format=torch.channels_last).requires_grad_()):
        torch.library.opcheck(convolutions._forward, (images, weight, stride))
        dy = torch.randn_like(convolutions._forward(images, weight, stride)).detach()
        plain = (images.detach(), weight.detach(), dy, stride)
        for wanted in (True, False):
            torch.library.opcheck(convolutions._backward, (*plain, wanted))


@pytest.mark.parametrize("add", [False, True])
def test_the_ensemble_s_norms_are_what_compilers_are_told(add: bool) -> None:
    shape = (2, 3 * 4, 6, 6)
    x, other = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    last = torch.channels_last
    for images in (x, x.detach().to(memory_format=last).requires_grad_()):
        torch.library.opcheck(
            norms._forward, (images, weight, bias, other if add else None, 3, add)
        )
        with torch.no_grad():
            y, statistics = norms._forward(images, weight, bias, other if add else None, 3, add)
            plain = (images.detach(), y, torch.randn_like(y), weight.detach(), statistics)
        torch.library.opcheck(norms._backward, (*plain, 3, add, add))


def test_the_ensemble_s_norms_have_pytorch_s_values_and_gradients() -> None:
    """In float64, like the network above, whose BatchNorms have hardly moved after six updates."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(4).double() for _ in range(3)]
    for layer in layers:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    together = GroupedNorm(layers).double()
    x, other = (torch.randn(5, 12, 6, 6, dtype=torch.float64) for _ in range(2))
    for training in (True, False):
        together.train(training)
        inputs = [t.clone().requires_grad_() for t in (x, other)]
        y = together(*inputs, relu=True)
        single = [t.clone().requires_grad_() for t in (x, other)]
        for layer in layers:
            layer.train(training)
        parts = zip(layers, single[0].chunk(3, 1), single[1].chunk(3, 1), strict=True)
        alone = torch.cat([F.relu(layer(a) + b) for layer, a, b in parts], 1)
        torch.testing.assert_close(y, alone)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, [*inputs, together.weight, together.bias], dy)
        weights = [layer.weight for layer in layers] + [layer.bias for layer in layers]
        exact = torch.autograd.grad(alone, [*single, *weights], dy)
        expected = [*exact[:2], torch.cat(exact[2:5]), torch.cat(exact[5:])]
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right)
        state = [layer.state_dict() for layer in layers]
        running = [torch.cat([s[name] for s in state]) for name in ("running_mean", "running_var")]
        torch.testing.assert_close(together.running, torch.stack(running))
