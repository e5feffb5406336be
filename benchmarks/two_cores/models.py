"""The three networks, their data and their loss: the same for every contestant."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.zoo import resnet

CONTEXT, VOCABULARY = 64, 256
_DISTINCT_BATCHES = 4  # values do not change the work; a few, so that no cache learns one by heart


@dataclass(frozen=True)
class Workload:
    """A network with the size of its batch and a way to make one."""

    batch: int
    build: Callable[[], nn.Sequential]
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.build()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same few random batches in every process, for ever."""
        generator = torch.Generator().manual_seed(1)
        return cycle([self.sample(self.batch, generator) for _ in range(_DISTINCT_BATCHES)])


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the last dimension: of images or of every token."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)  # type: ignore[arg-type]


def alexnet(classes: int = 10) -> nn.Sequential:
    """AlexNet for 32x32 images: five convolutions, two hidden layers of 4096.

    >>> sum(p.numel() for p in alexnet().parameters())
    23272266
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256 * 2 * 2, 4096), nn.ReLU(),
        nn.Linear(4096, 4096), nn.ReLU(),
        nn.Linear(4096, classes),
    )  # fmt: skip


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(x) + self.places
        return embedded


class Attention(nn.Module):
    """Half a decoder block: causal self-attention beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, places, width = x.shape
        each = self.project_in(self.norm(x)).view(rows, places, 3, self.heads, -1)
        query, key, value = each.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.project_out(mixed.transpose(1, 2).reshape(rows, places, width))
        return x + attended


class Perceptron(nn.Module):
    """The other half: two linear layers beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.layers(x)
        return x + grown


def transformer(layers: int = 6, width: int = 128, heads: int = 4) -> nn.Sequential:
    """A small decoder; every half block can end a stage.

    >>> sum(p.numel() for p in transformer().parameters())
    1263872
    """
    halves = [half for _ in range(layers) for half in (Attention(width, heads), Perceptron(width))]
    head = [nn.LayerNorm(width), nn.Linear(width, VOCABULARY)]
    return nn.Sequential(Embedding(width), *halves, *head)


def _images(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (rows,), generator=generator)


def _text(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WORKLOADS = {
    "resnet20": Workload(128, lambda: resnet(20), _images),
    "alexnet": Workload(128, alexnet, _images),
    "transformer": Workload(32, transformer, _text),
}
