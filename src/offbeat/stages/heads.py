"""The auxiliary head of DGL: what lets a stage in the middle learn from the labels."""

import math

from torch import Tensor, nn

from offbeat.errors import ConfigurationError
from offbeat.nest import Nest


def default_head(activation: Nest, output: Nest) -> nn.Module:
    """The paper's head for images; for plain vectors its three hidden linear layers.

    Average-pool to a quarter of the side, three 1x1 convolutions, pool to 2x2, three hidden linear
    layers, a linear classifier; BatchNorm and ReLU after each.
    """
    images = isinstance(activation, Tensor) and activation.dim() == 4
    vectors = isinstance(activation, Tensor) and activation.dim() == 2
    if not (images or vectors) or not isinstance(output, Tensor) or output.dim() != 2:
        raise ConfigurationError(
            f"DGL's own head reads images or vectors and predicts classes; a stage here passes on"
            f" {_shape(activation)} and the network ends in {_shape(output)}. Give"
            " DGL(head=factory), where factory(activation, output) returns a module."
        )
    channels, classes = activation.shape[1], output.shape[1]
    placed = {"device": activation.device, "dtype": output.dtype}
    if vectors:
        return _classifier(channels, classes).to(**placed)
    height, width = activation.shape[2:]
    quarter = (math.ceil(height / 4), math.ceil(width / 4))
    convolutions: list[nn.Module] = []
    for _ in range(3):
        convolutions += [
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(
        _pool((height, width), quarter),
        *convolutions,
        _pool(quarter, (2, 2)),
        nn.Flatten(),
        _classifier(4 * channels, classes),
    ).to(**placed)


def _pool(given: tuple[int, int], wanted: tuple[int, int]) -> nn.Module:
    """Average pooling to a size; the plain kind where it divides, which GPUs do alike each time."""
    if given[0] % wanted[0] or given[1] % wanted[1]:
        return nn.AdaptiveAvgPool2d(wanted)
    return nn.AvgPool2d((given[0] // wanted[0], given[1] // wanted[1]))


def _classifier(width: int, classes: int) -> nn.Sequential:
    hidden: list[nn.Module] = []
    for _ in range(3):
        hidden += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def _shape(value: Nest) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
