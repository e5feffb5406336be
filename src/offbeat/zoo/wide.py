"""ResNets whose shortcuts have weights: ResNet-18 for small images and WRN-28-10.

A placement vector counts every convolution, those of the shortcuts included.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.zoo.layers import GlobalAverage, conv3, start_from_he


def resnet18(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """ResNet-18 with the stem for 32x32: a 3x3 convolution, no pooling, eight basic blocks.

    Reference: He et al., "Deep Residual Learning for Image Recognition", 2016 (arXiv 1512.03385).

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    layers: list[nn.Module] = [conv3(channels, 64), nn.BatchNorm2d(64), nn.ReLU()]
    narrow = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ProjectedBlock(narrow, wide, stride), ProjectedBlock(wide, wide, 1)]
        narrow = wide
    layers += [GlobalAverage(), nn.Linear(narrow, classes)]
    return start_from_he(nn.Sequential(*layers))


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


class ProjectedBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; where the shape changes, a 1x1 convolution in it."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv3(narrow, wide, stride)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = conv3(wide, wide)
        self.bn2 = nn.BatchNorm2d(wide)
        self.shortcut = nn.Sequential()
        if stride != 1 or narrow != wide:
            self.shortcut.append(nn.Conv2d(narrow, wide, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        # Nothing in place: a stage keeps x, and an update may come before x's backward.
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self.shortcut(x))


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
