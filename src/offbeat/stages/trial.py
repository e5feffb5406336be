"""Modules on trial: they run, and their buffers, modes and every generator are as before."""

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.nest import Nest
from offbeat.rng import seeded
from offbeat.stages.buffers import WrittenBuffers


@contextmanager
def leave_untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leaves the buffers of modules that run meanwhile, and every generator, as they were."""
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


@contextmanager
def keep_modes(model: nn.Module) -> Iterator[None]:
    """Puts every module back into training or evaluation, as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def switch_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Puts a model into training, each module in the mode that it has there, or evaluation."""
    with keep_modes(model):
        # train() recurses: in a model that is in training already it would wake frozen BatchNorms.
        if not (training and model.training):
            model.train(training)
        yield


def call(model: nn.Module, x: Nest) -> Nest:
    """Calls a model with a batch; a dict of its arguments' names is spread over them."""
    names, takes_others = arguments_of(model)
    settings = {"use_cache": False} if "use_cache" in names else {}  # nothing is generated here
    if isinstance(x, dict) and is_spread(x, names, takes_others):
        return model(**{**x, **settings})
    return model(x, **settings)


def arguments_of(model: nn.Module) -> tuple[Collection[str], bool]:
    """The names of what a model can be called with, and whether it takes others as well."""
    given = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_others = any(p.kind is p.VAR_KEYWORD for p in given)
    inner = getattr(model, "get_base_model", None)
    if takes_others and callable(inner):  # adapters of peft hand on what they do not know
        own, takes_others = arguments_of(inner())
        names.update(own)
    return names, takes_others


def is_spread(x: Mapping[str, Nest], names: Collection[str], takes_others: bool) -> bool:
    """Whether a batch is the arguments of a model with these names, and not one of them."""
    known = [name in names for name in x]
    return all(known) or (takes_others and any(known))


class Whole(nn.Module):
    """A model in one stage, called as it would be in several."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Nest) -> Nest:
        return call(self.model, x)


def outputs_of(modules: Sequence[nn.Module], batch: Nest) -> list[Nest]:
    """What each module returns when they run one after the other."""
    outputs = []
    value = nest.replace(batch, lambda t: t.clone())
    with leave_untouched(modules):
        for module in modules:
            value = module(value)
            outputs.append(nest.replace(value, lambda t: t.clone()))
    return outputs


def same_values(one: Nest, other: Nest) -> bool:
    """Whether two nests hold the same values, in tensors of the same shapes and dtypes.

    NaN is the same as NaN, and 0 as -0.
    """
    ours, theirs = nest.tensors(one), nest.tensors(other)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())
