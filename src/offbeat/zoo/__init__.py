"""Networks and data for demos, tests and benchmarks; nothing in the library needs them."""

from offbeat.zoo.convnets import alexnet, digits_cnn, lenet5, vgg16
from offbeat.zoo.data import DATA, Data, Loader, batches, data_named, digits
from offbeat.zoo.gpt import gpt
from offbeat.zoo.mlp import mlp
from offbeat.zoo.networks import NETWORKS, network, network_for, settings_of
from offbeat.zoo.resnet import resnet, resnet18, wrn28_10

__all__ = [
    "DATA",
    "Data",
    "Loader",
    "NETWORKS",
    "alexnet",
    "batches",
    "data_named",
    "digits",
    "digits_cnn",
    "gpt",
    "lenet5",
    "mlp",
    "network",
    "network_for",
    "resnet",
    "resnet18",
    "settings_of",
    "vgg16",
    "wrn28_10",
]
