"""What is trained: networks, batches and precision, the same for every contestant."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.zoo import gpt, resnet

BATCHES = 8
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    model: Callable[[], nn.Sequential]
    images: bool
    rows: int
    bf16: bool
    tokens: int = 0
    channels_last: bool = False

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else None

    def made(self) -> nn.Sequential:
        torch.manual_seed(0)
        model = self.model().cuda()
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """On the GPU, so that nobody's loader is measured."""
        generator = torch.Generator("cuda").manual_seed(1)
        made = []
        for _ in range(BATCHES):
            if self.images:
                x = torch.randn(self.rows, 3, 32, 32, device="cuda", generator=generator)
                y = torch.randint(10, (self.rows,), device="cuda", generator=generator)
                if self.channels_last:
                    x = x.to(memory_format=torch.channels_last)
            else:
                shape = (self.rows, self.tokens)
                x = torch.randint(VOCABULARY, shape, device="cuda", generator=generator)
                y = torch.randint(VOCABULARY, shape, device="cuda", generator=generator)
            made.append((x, y))
        return made

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.images:
            return F.cross_entropy(output, target)
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.images:
            return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4)
        return torch.optim.AdamW(params, lr=1e-4, capturable=True)


def _resnet(depth: int, rows: int, precision: str) -> Workload:
    return Workload(
        name=f"resnet-{depth}-{rows}-{precision}",
        model=lambda: resnet(depth),
        images=True,
        rows=rows,
        bf16=precision.startswith("bf16"),
        channels_last=precision.endswith("channels-last"),
    )


def _gpt(layers: int, width: int, rows: int) -> Workload:
    return Workload(
        name=f"gpt-{layers}x{width}-{rows}-bf16",
        model=lambda: gpt(VOCABULARY, context=256, layers=layers, width=width, heads=width // 64),
        images=False,
        rows=rows,
        tokens=256,
        bf16=True,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        *(
            _resnet(depth, 128, precision)
            for depth in (110, 56, 20)
            for precision in ("fp32", "bf16", "bf16-channels-last")
        ),
        _resnet(56, 512, "fp32"),
        _resnet(20, 512, "fp32"),
        _gpt(16, 256, 8),
        _gpt(12, 768, 8),
    )
}
