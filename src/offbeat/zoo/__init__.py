"""Networks and data for demos, tests and benchmarks; nothing in the library needs them."""

from offbeat.zoo.cnn import digits_cnn
from offbeat.zoo.data import batches, digits
from offbeat.zoo.resnet import resnet

__all__ = ["batches", "digits", "digits_cnn", "resnet"]
