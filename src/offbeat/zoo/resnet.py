"""ResNets for small images, flat, so that every block boundary can end a stage.

A placement vector counts every convolution, those of the shortcuts included.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.errors import ConfigurationError
from offbeat.zoo.convnets import conv3, start_from_he


def resnet(depth: int, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """A ResNet of depth 6n+2 with basic blocks and shortcuts without parameters.

    One convolution, n blocks each of 16, 32 and 64 channels, one linear layer: 6n+2 weighted
    layers, so the papers' placement vectors count as they do in the papers (ResNet-20 is cut by
    ``ppv=(7,)`` after its 16-channel group).

    Reference: He et al., "Deep Residual Learning for Image Recognition", 2016 (arXiv 1512.03385),
    section 4.2.

    >>> sum(p.numel() for p in resnet(20).parameters())
    269722
    """
    if not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
        raise ConfigurationError(
            f"resnet(depth={depth!r}): three groups of n two-layer blocks, a first convolution and"
            f" a last linear layer make a depth of 6n+2. {_nearest(depth)}"
        )
    return _network_of(BasicBlock, (16, 32, 64), (depth - 2) // 6, classes, channels)


def resnet18(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """ResNet-18 with the stem for 32x32: a 3x3 convolution, no pooling, eight basic blocks.

    Reference: He et al., "Deep Residual Learning for Image Recognition", 2016 (arXiv 1512.03385).

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    return _network_of(ProjectedBlock, (64, 128, 256, 512), 2, classes, channels)


def wrn28_10(classes: int = 10, channels: int = 3, dropout: float = 0.0) -> nn.Sequential:
    """Wide ResNet of 28 layers, ten times as wide; its blocks normalise first.

    ``dropout`` lies between the two convolutions of a block; the reference tries 0.3.

    Reference: Zagoruyko, Komodakis, "Wide Residual Networks", 2016 (arXiv 1605.07146).

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in wrn28_10().parameters())
    36479194
    """
    layers: list[nn.Module] = [conv3(channels, 16)]
    narrow = 16
    for wide, stride in ((160, 1), (320, 2), (640, 2)):
        layers.append(WideBlock(narrow, wide, stride, dropout))
        layers += [WideBlock(wide, wide, 1, dropout) for _ in range(3)]
        narrow = wide
    layers += [nn.BatchNorm2d(narrow), nn.ReLU(), GlobalAverage(), nn.Linear(narrow, classes)]
    return start_from_he(nn.Sequential(*layers))


def _network_of(
    block: type["BasicBlock"], widths: Sequence[int], count: int, classes: int, channels: int
) -> nn.Sequential:
    """A convolution, ``count`` blocks of each width, a linear layer."""
    layers: list[nn.Module] = [conv3(channels, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for narrow, wide in pairwise([widths[0], *widths]):
        layers += [block(narrow, wide), *(block(wide, wide) for _ in range(count - 1))]
    layers += [GlobalAverage(), nn.Linear(widths[-1], classes)]
    return start_from_he(nn.Sequential(*layers))


class GlobalAverage(nn.Module):
    """One number per channel. Not AdaptiveAvgPool2d, which is not deterministic on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; wider output means half the side.

    The shortcut is He's option A: every second pixel, and zeros for the channels that are new.
    """

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.stride = 1 if narrow == wide else 2
        self.new_channels = wide - narrow
        self.conv1 = conv3(narrow, wide, self.stride)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = conv3(wide, wide)
        self.bn2 = nn.BatchNorm2d(wide)

    def forward(self, x: Tensor) -> Tensor:
        # Nothing in place: a stage keeps x, and an update may come before x's backward.
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            return x
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels))


class ProjectedBlock(BasicBlock):
    """A block whose shortcut has weights where the shape changes: a 1x1 convolution."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__(narrow, wide)
        self.shortcut = nn.Sequential()
        if narrow != wide:
            self.shortcut.append(nn.Conv2d(narrow, wide, 1, stride=self.stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(wide))

    def _shortcut(self, x: Tensor) -> Tensor:
        return self.shortcut(x)  # type: ignore[no-any-return]


class WideBlock(nn.Module):
    """BatchNorm, ReLU and convolution, twice; a shortcut with weights starts behind the ReLU."""

    def __init__(self, narrow: int, wide: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv1 = conv3(narrow, wide, stride)
        self.bn2 = nn.BatchNorm2d(wide)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv3(wide, wide)
        changes = stride != 1 or narrow != wide
        self.shortcut = nn.Conv2d(narrow, wide, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.bn1(x))
        residual: Tensor = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(ready)))))
        beside: Tensor = x if self.shortcut is None else self.shortcut(ready)
        return beside + residual


def _nearest(depth: object) -> str:
    if not isinstance(depth, int) or depth < 8:
        return "The smallest is 8; the papers use 20, 32, 44, 56 and 110."
    below = depth - (depth - 2) % 6
    return f"The nearest are {below} and {below + 6}."
