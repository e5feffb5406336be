"""A multi-layer perceptron of any widths."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from offbeat.errors import ConfigurationError


def mlp(inputs: int = 784, hidden: Sequence[int] = (256, 256), classes: int = 10) -> nn.Sequential:
    """Flattens its input, then a linear layer and a ReLU per hidden width, then the classes.

    >>> sum(p.numel() for p in mlp(64, hidden=(32,)).parameters())
    2410
    """
    widths = [inputs, *hidden, classes]
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise ConfigurationError(
            f"mlp(inputs={inputs!r}, hidden={hidden!r}, classes={classes!r}): every width is"
            " a whole number of at least 1."
        )
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
