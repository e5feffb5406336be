"""The CIFAR ResNets of the papers, flat, so that every block boundary can end a stage."""

from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.errors import ConfigurationError
from offbeat.zoo.layers import GlobalAverage, conv3, start_from_he

__all__ = ["BasicBlock", "GlobalAverage", "resnet"]


def resnet(depth: int, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """A ResNet of depth 6n+2 with basic blocks and shortcuts without parameters.

    One convolution, n blocks each of 16, 32 and 64 channels, one linear layer: 6n+2 weighted
    layers, so the papers' placement vectors count as they do in the papers (ResNet-20 is cut by
    ``ppv=(7,)`` after its 16-channel group). The papers use 20, 32, 44, 56, 98, 110, 164, 224 and
    362, all of this one kind.

    Reference: He et al., "Deep Residual Learning for Image Recognition", 2016 (arXiv 1512.03385),
    section 4.2. Convolutions start from He's normal distribution (fan out), the linear layer from
    PyTorch's default.

    >>> sum(p.numel() for p in resnet(20).parameters())
    269722
    """
    if not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
        raise ConfigurationError(
            f"resnet(depth={depth!r}): three groups of n two-layer blocks, a first convolution and"
            f" a last linear layer make a depth of 6n+2. {_nearest(depth)}"
        )
    blocks = (depth - 2) // 6
    layers: list[nn.Module] = [conv3(channels, 16), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for wanted in (16, 32, 64):
        for _ in range(blocks):
            layers.append(BasicBlock(width, wanted))
            width = wanted
    layers += [GlobalAverage(), nn.Linear(width, classes)]
    return start_from_he(nn.Sequential(*layers))


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


def _nearest(depth: object) -> str:
    if not isinstance(depth, int) or depth < 8:
        return "The smallest is 8; the papers use 20, 32, 44, 56 and 110."
    below = depth - (depth - 2) % 6
    return f"The nearest are {below} and {below + 6}."
