"""A network small enough for a laptop and long enough for four stages."""

from torch import nn


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
    # No bias: the BatchNorm behind it has one.
    conv = nn.Conv2d(narrow, wide, 3, padding=1, bias=False)
    return conv, nn.BatchNorm2d(wide), nn.ReLU()
