"""Data that needs no download: scikit-learn's 1797 handwritten digits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from offbeat.errors import BatchError, MissingExtra
from offbeat.rng import generator
from offbeat.zoo.data.images import hold_out
from offbeat.zoo.settings import require_part

Split = tuple[Tensor, Tensor, Tensor, Tensor]


def digits(seed: int = 0, test_share: float = 0.2) -> Split:
    """``x_train, y_train, x_test, y_test``: 8x8 images with one channel, classes 0 to 9.

    The split depends on ``seed`` alone. Pixels are scaled by mean and deviation of the training
    part, so that nothing of the test part is seen in training.
    """
    train, y_train, test, y_test = raw_digits(seed, test_share)
    mean, deviation = train.mean(), train.std()
    return (train - mean) / deviation, y_train, (test - mean) / deviation, y_test


def raw_digits(seed: int, test_share: float) -> Split:
    """The same split, with pixels as they are: 0 to 16."""
    require_part("data 'digits': test_share", test_share)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra(
            "data 'digits' reads its images from scikit-learn, which is missing:"
            " pip install scikit-learn; or take other data ('offbeat data' lists them)"
        ) from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    classes = torch.tensor(found.target, dtype=torch.int64)
    train, test = hold_out(len(images), test_share, seed)
    return images[train], classes[train], images[test], classes[test]


def batches(
    x: Tensor, y: Tensor, size: int, *, seed: int, epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in an order of its own; the short last batch is kept.

    The order is keyed by (seed, epoch), so any epoch can be read again without the ones before.
    """
    if size < 1 or len(x) != len(y):
        raise BatchError(
            f"batches of {size} rows from {len(x)} inputs and {len(y)} targets: give a size of at"
            " least 1, and as many targets as inputs."
        )
    order = torch.randperm(len(x), generator=generator("epoch", seed, epoch))
    for rows in order.split(size):
        yield x[rows], y[rows]
