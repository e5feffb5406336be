"""A network small enough for a laptop and long enough for four stages."""

from torch import nn

from offbeat.zoo.layers import conv3


def digits_cnn(classes: int = 10) -> nn.Sequential:
    """Five convolutions for one-channel 8x8 images, a BatchNorm behind each.

    All but the first cost the same arithmetic, so that four stages of equal cost exist.

    >>> sum(p.numel() for p in digits_cnn().parameters())
    14210
    """
    return nn.Sequential(
        *_layer(1, 8),
        *_layer(8, 8),
        *_layer(8, 8),
        nn.MaxPool2d(2),  # 8x8 -> 4x4
        *_layer(8, 32),
        nn.MaxPool2d(2),  # 4x4 -> 2x2
        *_layer(32, 32),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, classes),
    )


def _layer(narrow: int, wide: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    return conv3(narrow, wide), nn.BatchNorm2d(wide), nn.ReLU()
