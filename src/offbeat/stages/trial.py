"""Modules run on trial: their buffers and every generator are left as they were."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offbeat import nest
from offbeat.nest import Nest
from offbeat.rng import seeded
from offbeat.stages.buffers import WrittenBuffers


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Runs modules and leaves their buffers and every generator as they were."""
    device = next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))
    with (
        torch.no_grad(),
        seeded(0, device),
        WrittenBuffers(modules).restored(),
        warnings.catch_warnings(),
    ):
        # Training will say it again; that gradients will be None is true of these runs alone.
        warnings.simplefilter("ignore")
        yield


def outputs_of(modules: Sequence[nn.Module], batch: Nest) -> list[Nest]:
    """What each module returns when they run one after the other."""
    outputs = []
    value = nest.replace(batch, lambda t: t.clone())
    with untouched(modules):
        for module in modules:
            value = module(value)
            outputs.append(nest.replace(value, lambda t: t.clone()))
    return outputs
