"""Chains of convolutions for small images, layer by layer, so that the papers' cuts fit.

Windows of the max-poolings do not overlap: every input belongs to one window, so that a GPU adds up
their gradients in no order at all.
"""

from torch import nn

from offbeat.errors import ConfigurationError


def digits_cnn(classes: int = 10) -> nn.Sequential:
    """Five convolutions for one-channel 8x8 images, a BatchNorm behind each.

    All but the first cost the same arithmetic, so that four stages of equal cost exist.

    >>> sum(p.numel() for p in digits_cnn().parameters())
    14210
    """
    return nn.Sequential(
        *_conv_norm_relu(1, 8),
        *_conv_norm_relu(8, 8),
        *_conv_norm_relu(8, 8),
        nn.MaxPool2d(2),  # 8x8 -> 4x4
        *_conv_norm_relu(8, 32),
        nn.MaxPool2d(2),  # 4x4 -> 2x2
        *_conv_norm_relu(32, 32),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, classes),
    )


def lenet5(classes: int = 10, channels: int = 1, side: int = 28) -> nn.Sequential:
    """Two convolutions and three linear layers, with ReLU and max-pooling; for 28x28 digits.

    The paper's four-stage placement is ``ppv=(2,)``: behind the second pooling.

    Reference: LeCun et al., "Gradient-based learning applied to document recognition", 1998.

    >>> sum(p.numel() for p in lenet5().parameters())
    61706
    """
    left = (side // 2 - 4) // 2
    _require_side("lenet5", side, 12, left)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * left * left, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def alexnet(
    classes: int = 10, channels: int = 3, side: int = 32, dropout: float = 0.5
) -> nn.Sequential:
    """AlexNet for 32x32: five convolutions, two linear layers of 4096 and the classes.

    The paper's four-stage placement is ``ppv=(3,)``.

    Reference: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks",
    2012; widths as in "One weird trick" (arXiv 1404.5997), kernels of 3 for the small images.

    >>> sum(p.numel() for p in alexnet().parameters())
    23272266
    """
    left = (side + 1) // 2 // 8
    _require_side("alexnet", side, 15, left)
    return start_from_he(
        nn.Sequential(
            nn.Conv2d(channels, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *_conv_relu(64, 192),
            nn.MaxPool2d(2),
            *_conv_relu(192, 384),
            *_conv_relu(384, 256),
            *_conv_relu(256, 256),
            nn.MaxPool2d(2),
            nn.Flatten(),
            *_head(256 * left * left, 4096, classes, dropout),
        )
    )


def vgg16(
    classes: int = 10, channels: int = 3, side: int = 32, dropout: float = 0.5
) -> nn.Sequential:
    """VGG-16 for 32x32, without BatchNorm: 13 convolutions and a head of 512, 512 and the classes.

    The paper's four-stage placement is ``ppv=(2,)``: behind the first pooling.

    Reference: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
    Recognition", 2015 (arXiv 1409.1556), configuration D.

    >>> sum(p.numel() for p in vgg16().parameters())
    15245130
    """
    left = side // 32
    _require_side("vgg16", side, 32, left)
    layers: list[nn.Module] = []
    narrow = channels
    for group in ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3):
        for wide in group:
            layers += _conv_relu(narrow, wide)
            narrow = wide
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), *_head(512 * left * left, 512, classes, dropout)]
    return start_from_he(nn.Sequential(*layers))


def _conv_norm_relu(narrow: int, wide: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    return conv3(narrow, wide), nn.BatchNorm2d(wide), nn.ReLU()


def _conv_relu(narrow: int, wide: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(narrow, wide, 3, padding=1), nn.ReLU()


def _head(inputs: int, width: int, classes: int, dropout: float) -> list[nn.Module]:
    return [
        nn.Dropout(dropout),
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    ]


def _require_side(name: str, side: int, smallest: int, left: int) -> None:
    if left < 1:
        raise ConfigurationError(
            f"{name}(side={side}): its poolings leave nothing of images that small. Give a side of"
            f" at least {smallest}, or a network that takes any: resnet20, mlp."
        )


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
