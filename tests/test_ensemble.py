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
from offbeat.stage import Loss
from offbeat.zoo import resnet

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.accuracy import kernels
from benchmarks.accuracy.ensemble import ensemble, side_by_side, summed_loss

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
def test_the_ensemble_s_operators_are_what_compilers_are_told(stride: int) -> None:
    """Shapes, layouts and gradients of both, also where the input lies otherwise."""
    x = torch.randn(2, 3 * 4, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3 * 8, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    for images in (x, x.detach().to(memory_format=torch.channels_last).requires_grad_()):
        torch.library.opcheck(kernels._forward, (images, weight, 3, stride))
        dy = torch.randn_like(kernels._forward(images, weight, 3, stride)).detach()
        plain = (images.detach(), weight.detach(), dy, 3, stride)
        for wanted in (True, False):
            torch.library.opcheck(kernels._backward, (*plain, wanted))
