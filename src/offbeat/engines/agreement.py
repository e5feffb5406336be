"""What processes that train together must have been given alike, compared in words."""

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch

from offbeat.cutting.cut import Cut
from offbeat.engines.board import LOST
from offbeat.engines.feed import checksum_of
from offbeat.engines.setup import Setup, describe
from offbeat.errors import ConfigurationError

Exchange = Callable[[str, Any], list[Any]]
"""Gives a value to all processes and returns theirs, by rank."""

_REMEDIES = {
    "the model": "Build the same model everywhere.",
    "what weights the model starts from": (
        "Call torch.manual_seed with one number before the model is built."
    ),
    "the type of device": "Use one type of device.",
    "the number of threads": (
        "It changes the bits: set OMP_NUM_THREADS, or torch.set_num_threads, alike."
    ),
    "the version of torch": "Install one version everywhere.",
    "the seed": "Give every process the same seed, or none.",
}
"""What to do where processes differ in a fact, other than to give every process the same."""


def agreed_seed(exchange: Exchange, rank: int, setup: Setup, cut: Cut, seed: int | None) -> int:
    """The seed to use, after all that must be the same was found to be."""
    tensors = cut.model.state_dict()
    shapes = "".join(f"{name}{tuple(t.shape)}{t.dtype}" for name, t in tensors.items())
    facts = {
        "the method": describe(setup.course.method),
        "the averaging": describe(setup.averaging),
        "the corrections": describe(setup.course.corrections),
        "whether there is a penalty": setup.penalty is not None,
        "the weight": setup.weight.words,
        "the model": f"{len(tensors)} tensors, digest {crc32(shapes.encode()):08x}",
        "the type of device": setup.device.type,
        "the number of threads": torch.get_num_threads(),
        "the version of torch": torch.__version__,
        "the seed": seed,
    }
    compare(exchange, rank, facts)
    digest = "on meta"
    if cut.absent is None:
        digest = f"digest {checksum_of(list(tensors.values())):08x}"
    compare(exchange, rank, {"what weights the model starts from": digest})
    seeds = exchange("seed", torch.initial_seed() if seed is None else seed)
    compare(exchange, rank, {"the guards": str(setup.guards)})
    return int(seeds[0])


def compare(exchange: Exchange, own: int, facts: dict[str, Any]) -> None:
    """Compares facts over all processes; names a difference with both values and a remedy."""
    for rank, theirs in enumerate(exchange("facts", facts)):
        for name, value in facts.items():
            if theirs is not LOST and theirs[name] != value:
                first, second = sorted([(own, value), (rank, theirs[name])])
                remedy = _REMEDIES.get(name, "Give every process the same.")
                raise ConfigurationError(
                    f"{name} differs between processes: {first[1]} on rank {first[0]},"
                    f" {second[1]} on rank {second[0]}. {remedy}"
                )
