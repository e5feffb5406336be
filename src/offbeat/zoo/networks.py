"""Networks by name."""

import re
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.base import require_count
from offbeat.zoo.convnets import alexnet, digits_cnn, lenet5, vgg16
from offbeat.zoo.data.sets import Data
from offbeat.zoo.gpt import gpt
from offbeat.zoo.mlp import mlp
from offbeat.zoo.resnet import resnet, resnet18, wrn28_10
from offbeat.zoo.settings import check_settings, plain_name

Build = Callable[..., nn.Sequential]

NETWORKS: dict[str, Build] = {
    "digits-cnn": digits_cnn,
    "mlp": mlp,
    "lenet5": lenet5,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet18": resnet18,
    **{f"resnet{n}": partial(resnet, n) for n in (20, 32, 44, 56, 98, 110, 164, 224, 362)},
    "wrn28-10": wrn28_10,
    "gpt": gpt,
}


def network(name: str, /, **settings: Any) -> nn.Sequential:
    """A network by its name; hyphens, underscores, spaces and capitals do not matter.

    ``settings`` are the arguments of its function. Other CIFAR ResNets work by name too, for
    example ``"resnet26"``.

    >>> len(network("ResNet-20", classes=100)[-1].bias)
    100
    """
    build = _build(name)
    _check_network(name, build, settings)
    return build(**settings)


def settings_of(name: str) -> dict[str, Any]:
    """The settings a network takes, with their defaults; ``...`` for those that must be given."""
    parameters = signature(_build(name)).parameters.values()
    return {p.name: ... if p.default is Parameter.empty else p.default for p in parameters}


def _build(name: str) -> Build:
    wanted = plain_name(name)
    for known, build in NETWORKS.items():
        if wanted == plain_name(known):
            return build
    depth = re.fullmatch(r"resnet(\d+)", wanted)
    imagenet = ("resnet50", "resnet152")  # 6n+2 too, but these names mean other networks
    if depth is not None and (int(depth[1]) - 2) % 6 == 0 and wanted not in imagenet:
        return partial(resnet, int(depth[1]))
    raise unknown("network", name, NETWORKS)


def _check_network(name: str, build: Build, settings: dict[str, Any]) -> None:
    check_settings(f"network {name}", build, settings)
    for setting in ("classes", "channels"):
        require_count(f"network {name}: {setting}", settings.get(setting, 1))
    dropout = settings.get("dropout", 0)
    if not 0 <= dropout <= 1:
        raise ConfigurationError(f"network {name}: dropout={dropout!r}: give a share from 0 to 1.")


def network_for(data: Data, name: str, /, **settings: Any) -> nn.Sequential:
    """A network that fits the data: its classes, channels, vocabulary, ... are filled in.

    It is tried without memory or arithmetic first, so that a misfit is answered with words.

    >>> from offbeat.zoo import data_named
    >>> network_for(data_named("digits"), "mlp", hidden=[32])[1]
    Linear(in_features=64, out_features=32, bias=True)
    """
    build = _build(name)
    known = signature(build).parameters
    fitting = {key: value for key, value in data.settings.items() if key in known} | settings
    _check_network(name, build, fitting)
    whole = data.vocabulary is not None
    row = torch.zeros(2, *data.shape, dtype=torch.int64 if whole else None, device="meta")
    try:
        with torch.device("meta"):
            output = build(**fitting)(row)
    except ConfigurationError:
        raise
    except (RuntimeError, IndexError) as error:
        raise _misfit(data, name) from error
    except (ValueError, TypeError, ArithmeticError) as error:  # torch's words for a single value
        given = ", ".join(f"{key}={value!r}" for key, value in fitting.items())
        raise ConfigurationError(
            f"network {name} cannot be made with {given}: {str(error).partition(chr(10))[0]}."
            " Give values that it takes."
        ) from error
    if output.shape != (2, *((*data.shape, data.vocabulary) if whole else (data.classes,))):
        raise _misfit(data, name)
    return build(**fitting)


def _misfit(data: Data, name: str) -> ConfigurationError:
    outputs = data.vocabulary or data.classes
    kind = "tokens" if data.vocabulary is not None else "images"
    return ConfigurationError(
        f"network {name} does not fit data {data.name!r}, whose rows are {kind} of shape"
        f" {data.shape} with {outputs} different targets. For text take gpt; for images of any"
        " size mlp or resnet20."
    )
