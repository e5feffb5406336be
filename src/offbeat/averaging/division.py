"""Which weights of a stage each fragment has: runs of equally large blocks, or those named."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from torch import nn

from offbeat.averaging.base import Fragments
from offbeat.cutting.balance import cut_by_costs
from offbeat.errors import ConfigurationError
from offbeat.stages.stage import Stage

_ENOUGH = 1.25
"""Blocks are divided only while the largest fragment is more than so many times the mean."""

Part = list[nn.Parameter]


def divide(stage: Stage, fragments: int | Fragments, stages: int) -> list[Part]:
    """Per fragment its trainable weights in this stage, in order; named ones may have none here."""
    trainable = stage.trainable
    for parameter in trainable:
        if parameter.is_complex():
            raise ConfigurationError(
                f"stage {stage.index} has complex weights: averages are taken of real numbers only."
                " Hold them as pairs of real ones (torch.view_as_real)."
            )
    if not isinstance(fragments, int):
        return _named(stage, fragments)
    if fragments == 1 or not trainable:
        return [trainable] if trainable else []
    return _runs(stage, fragments, stages)


def _runs(stage: Stage, fragments: int, stages: int) -> list[Part]:
    """Runs of blocks; of parts of blocks where the largest fragment is much smaller then."""
    best: tuple[int, list[Part]] | None = None
    layers: list[Part] = []
    for layers in _levels(stage):
        if len(layers) < fragments:
            continue
        sizes = [sum(p.numel() for p in layer) for layer in layers]
        cuts = [0, *cut_by_costs(sizes, fragments), len(layers)]
        spans = list(pairwise(cuts))
        largest = max(sum(sizes[begin:end]) for begin, end in spans)
        if best is None or largest < best[0]:
            best = largest, [[p for own in layers[a:b] for p in own] for a, b in spans]
        if largest <= _ENOUGH * sum(sizes) / fragments:
            break
    if best is None:
        fewer = ", or cut the model into fewer stages" if stages > 1 else ""
        raise ConfigurationError(
            f"fragments={fragments}, but stage {stage.index} has {len(layers)} layers with weights:"
            f" give at most {len(layers)}{fewer}."
        )
    return best[1]


def _levels(stage: Stage) -> Iterator[list[Part]]:
    """The stage's weights by module: first the outermost modules, last those without any inside."""
    modules: list[nn.Module | Part] = list(stage.modules)
    trainable = set(map(id, stage.trainable))
    while True:
        seen: set[int] = set()
        layers = []
        for module in modules:
            weights = module.parameters() if isinstance(module, nn.Module) else module
            own = [p for p in weights if id(p) in trainable - seen]
            seen |= set(map(id, own))
            layers += [own] if own else []
        yield layers
        opened = [part for module in modules for part in _opened(module)]
        if len(opened) == len(modules) and all(map(operator.is_, opened, modules)):
            return
        modules = opened


def _opened(module: nn.Module | Part) -> list[nn.Module | Part]:
    """A module's own weights and the modules in it."""
    if not isinstance(module, nn.Module) or not any(True for _ in module.children()):
        return [module]
    own = list(module.parameters(recurse=False))
    return [*([own] if own else []), *module.children()]


def _named(stage: Stage, fragments: Fragments) -> list[Part]:
    names = stage.network.names
    for name in (name for fragment in fragments for name in fragment):
        if not any(_is_in(weight, name) for weight in names.values()):
            raise ConfigurationError(
                f"fragments name {name!r}, and the model has no weight of that name or in a module"
                f" of that name. Its weights: {_some(names.values())}."
            )
    parts: list[Part] = [[] for _ in fragments]
    for parameter in stage.trainable:
        name = names[id(parameter)]
        homes = [f for f, own in enumerate(fragments) if any(_is_in(name, one) for one in own)]
        if not homes and any(parameter is p for p in stage.trainable[stage.network.of_model :]):
            homes = [len(fragments) - 1]  # of a head, which the user cannot name
        if len(homes) != 1:
            where = f"fragments {' and '.join(map(str, homes))}" if homes else "no fragment"
            raise ConfigurationError(
                f"weight {name!r} of stage {stage.index} is in {where}: every weight that is"
                " trained is averaged in one. Name its module in one of them."
            )
        parts[homes[0]].append(parameter)
    return parts


def _is_in(weight: str, name: str) -> bool:
    return weight == name or weight.startswith(f"{name}.")


def _some(names: Iterable[str]) -> str:
    known = sorted(set(names))
    return ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")


def named_fragments(fragments: Sequence[Sequence[str]]) -> Fragments:
    """Names as a frozen value; refuses what are none."""
    whole = not isinstance(fragments, str) and all(
        not isinstance(own, str) and own and all(isinstance(name, str) for name in own)
        for own in fragments
    )
    if not whole or not fragments:
        raise ConfigurationError(
            f"fragments={fragments!r}: give a number, or for each fragment the names of its"
            ' modules, as in [["embed", "blocks.0"], ["blocks.1", "head"]].'
        )
    return tuple(tuple(own) for own in fragments)
