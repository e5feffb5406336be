"""Layers that several networks share."""

from torch import Tensor, nn


class GlobalAverage(nn.Module):
    """One number per channel. Not AdaptiveAvgPool2d, which is not deterministic on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def conv3(narrow: int, wide: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution without bias: the BatchNorm behind it has one."""
    return nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False)


def start_from_he(model: nn.Sequential) -> nn.Sequential:
    """Convolutions from He's normal distribution (fan out), their biases zero; returns the model.

    Linear layers keep PyTorch's default.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
