"""Many networks as one: every seed's network is a group of channels, so one run trains them all.

Small images and few channels leave a GPU idle; the same layer of many networks fills it. Nothing
passes between groups, BatchNorm and SGD go element by element, and the loss is a sum over the
networks: each one learns exactly what it would learn alone (tests/test_ensemble.py).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from benchmarks.accuracy.convolutions import conv3x3
from benchmarks.accuracy.norms import EPSILON, norm
from benchmarks.jobs import layers_of
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.zoo.resnet import BasicBlock

NORM_STATE = ("weight", "bias", "running_mean", "running_var")


def ensemble(make: Callable[[], nn.Sequential], seeds: Sequence[int]) -> nn.Sequential:
    """The networks that ``make`` returns under each seed, as groups of channels of one network."""
    return nn.Sequential(*(_together(list(layers)) for layers in layers_of(make, seeds)))


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """``outputs`` are (rows, networks, classes), ``targets`` (rows, networks)."""
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / len(targets)


def side_by_side(images: Sequence[Tensor]) -> Tensor:
    """Batches of every network's images as one batch, channels last."""
    return torch.cat(list(images), dim=1).contiguous(memory_format=torch.channels_last)


def _together(layers: list[nn.Module]) -> nn.Module:
    first = layers[0]
    if isinstance(first, nn.Conv2d):
        return GroupedConv(layers)
    if isinstance(first, nn.BatchNorm2d):
        return GroupedNorm(layers)
    if isinstance(first, nn.Linear):
        return GroupedLinear(layers)
    if isinstance(first, BasicBlock):
        return GroupedBlock(layers)
    if any(True for _ in first.parameters()):
        raise TypeError(f"an ensemble of {type(first).__name__} is not known")
    return deepcopy(first)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return module.state_dict()


class GroupedConv(nn.Module):
    """A convolution per network, each on its own group of channels."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        first = layers[0]
        assert isinstance(first, nn.Conv2d)
        if first.kernel_size != (3, 3) or first.padding != (1, 1) or first.bias is not None:
            raise TypeError(f"an ensemble of {first} is not known")
        self.stride = first.stride[0]
        weights = torch.stack([_state(m)["weight"] for m in layers])
        self.weight = nn.Parameter(weights.permute(0, 3, 4, 2, 1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # which does not know our operator
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return conv3x3(x, self.weight, self.stride)


class GroupedNorm(nn.Module):
    """A BatchNorm per network, with what a block adds behind it and the ReLU behind that."""

    running: Tensor

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        first = layers[0]
        assert isinstance(first, nn.BatchNorm2d)
        if first.eps != EPSILON or first.momentum is None:
            raise TypeError(f"an ensemble of {first} is not known")
        self.networks = len(layers)
        self.momentum = first.momentum
        together = {name: torch.cat([_state(m)[name] for m in layers]) for name in NORM_STATE}
        self.weight = nn.Parameter(together["weight"])
        self.bias = nn.Parameter(together["bias"])
        both = [together["running_mean"], together["running_var"]]
        self.register_buffer("running", torch.stack(both))

    def forward(self, x: Tensor, other: Tensor | None = None, relu: bool = False) -> Tensor:
        if self.training:
            y, statistics = norm(
                x, self.weight, self.bias, networks=self.networks, other=other, relu=relu
            )
            self.running.lerp_(statistics[:2], self.momentum)
            return y
        mean, variance = self.running
        y = F.batch_norm(x, mean, variance, self.weight, self.bias, eps=EPSILON)
        y = y if other is None else y + other
        return y.relu() if relu else y


class GroupedLinear(nn.Module):
    """A linear layer per network: (rows, networks x features) to (rows, networks, classes)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([_state(m)["weight"].T for m in layers]))
        self.bias = nn.Parameter(torch.stack([_state(m)["bias"] for m in layers]))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(1, (len(self.weight), -1)).transpose(0, 1)
        return torch.bmm(groups, self.weight).transpose(0, 1) + self.bias


class GroupedBlock(BasicBlock):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        first = layers[0]
        assert isinstance(first, BasicBlock)
        super().__init__(first.conv1.in_channels, first.conv1.out_channels)
        for name, _ in list(self.named_children()):
            setattr(self, name, _together([getattr(m, name) for m in layers]))
        self.networks = len(layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x), relu=True)
        made: Tensor = self.bn2(self.conv2(y), self._shortcut(x), relu=True)
        return made

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return x
        # Channels last throughout: the new, empty ones follow each network's own.
        rows = x.permute(0, 2, 3, 1)[:, :: self.stride, :: self.stride]
        wider = F.pad(rows.unflatten(-1, (self.networks, -1)), (0, self.new_channels))
        return wider.flatten(-2).permute(0, 3, 1, 2)
