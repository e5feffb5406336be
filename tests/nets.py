"""Networks by the book, in their usual wiring and a few channels, for tests/architectures.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution without bias and its BatchNorm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce, self.middle = conv(inputs, 4, 1), conv(4, 4, 3, stride)
        self.widen = conv(4, outputs, 1)
        self.skip = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.middle(F.relu(self.reduce(x), inplace=True)), inplace=True)
        return F.relu(self.widen(inner) + self.skip(x))


class ResNet(nn.Module):
    """torchvision's wiring: a forward that names its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(8, 8, 1))
        self.layer2 = nn.Sequential(Bottleneck(8, 16, 2), Bottleneck(16, 16, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.silu(self.fc1(F.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.fc2(scale))


class InvertedResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand, self.depth = conv(channels, 16, 1), conv(16, 16, 3, groups=16)
        self.squeeze, self.project = Squeeze(16), conv(16, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.depth(F.silu(self.expand(x))))
        return x + self.project(self.squeeze(inner))  # type: ignore[no-any-return]


class EfficientNet(nn.Module):
    """timm's wiring: a stem, nn.Sequentials of blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = conv(3, 8, 3, 2)
        self.blocks = nn.Sequential(*(InvertedResidual(8) for _ in range(4)))
        self.conv_head, self.classifier = conv(8, 16, 1), nn.Linear(16, 4)

    def forward_features(self, x: Tensor) -> Tensor:
        return F.silu(self.conv_head(self.blocks(F.silu(self.conv_stem(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.forward_features(x).mean((2, 3)))  # type: ignore[no-any-return]


class DenseNet(nn.Module):
    """Every layer takes all that came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.layers = nn.ModuleList(conv(8 + 4 * n, 4) for n in range(5))
        self.head = nn.Linear(28, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [F.relu(self.stem(x))]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.head(torch.cat(features, 1).mean((2, 3)))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """The skips of a U-Net, in ModuleLists, with an embedded time."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.downs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, stride=2) for _ in range(3))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.ups = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))
        self.outlet = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> dict[str, Tensor]:
        angle = timestep[:, None] * torch.arange(1, 9)
        time = F.silu(self.time(torch.sin(angle)))[:, :, None, None]
        hidden, skips = self.inlet(sample) + time, []
        for down in self.downs:
            skips.append(hidden)
            hidden = F.silu(down(hidden) + time)
        hidden = self.middle(hidden)
        for up, norm in zip(self.ups, self.norms, strict=True):
            hidden = torch.cat([F.interpolate(hidden, scale_factor=2.0), skips.pop()], 1)
            hidden = F.silu(norm(up(hidden)) + time)
        return {"sample": self.outlet(hidden)}


class DiTBlock(nn.Module):
    """Attention and a network, each shifted and scaled by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(16, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(16, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.condition = nn.Linear(16, 96)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(F.silu(c))[:, None].chunk(6, 2)
        inner = self.norm1(x) * (1 + scale) + shift
        x = x + gate * self.attention(inner, inner, inner, need_weights=False)[0]
        return x + gate2 * self.network(self.norm2(x) * (1 + scale2) + shift2)  # type: ignore[no-any-return]


class DiT(nn.Module):
    """A diffusion transformer, whose last layer takes the condition again."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.classes = nn.Conv2d(3, 16, 4, 4), nn.Embedding(4, 16)
        self.time = nn.Linear(1, 16)
        self.places = nn.Parameter(torch.randn(16, 16) / 4)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(4))
        self.last, self.outlet = nn.Linear(16, 32), nn.Linear(16, 48)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        hidden = self.patches(x).flatten(2).transpose(1, 2) + self.places
        condition = self.time(t[:, None]) + self.classes(y)
        for block in self.blocks:
            hidden = block(hidden, condition)
        shift, scale = self.last(F.silu(condition))[:, None].chunk(2, 2)
        out = self.outlet(F.layer_norm(hidden, (16,)) * (1 + scale) + shift)
        patches = out.unflatten(2, (3, 4, 4)).unflatten(1, (4, 4))
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)  # type: ignore[no-any-return]


class Seq2Seq(nn.Module):
    """torch's own nn.Transformer between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.transformer = nn.Transformer(16, 2, 3, 3, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        out = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(out)  # type: ignore[no-any-return]


class LSTMs(nn.Module):
    """Layers of LSTMs by hand, of which the output and the last states are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, states = self.embedding(ids), []
        for layer in self.layers:
            hidden, (last, _) = layer(hidden)
            states.append(last)
        return self.head(hidden), states


class Losses(nn.Module):
    """Exits after every block, each with a loss of its own: several outputs, one loss from each."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.exits = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden, logits = self.inlet(x), []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            hidden = hidden + torch.tanh(block(hidden))
            logits.append(leave(hidden))
        return {"logits": logits, "hidden": hidden}


class FrozenEncoder(nn.Module):
    """An encoder under no_grad in front of layers that train."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(6 if n == 0 else 16, 16) for n in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.encoder.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.encoder:
                x = torch.relu(layer(x))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * scale


class Hands(nn.Module):
    """Calls every block with a weight of its own, as DeBERTa does."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale if number != 1 else self.scale.view(1, 16))
        return self.head(x)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One block used four times, as ALBERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.block, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for _ in range(4):
            x = x + torch.tanh(self.block(x))
        return self.head(x)  # type: ignore[no-any-return]
