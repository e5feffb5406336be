"""Cutting a model into stages: as given, at child numbers, at weighted layers, or by cost."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from offbeat import nest
from offbeat.cutting import blocks as trunk
from offbeat.cutting.balance import balanced_cuts
from offbeat.cutting.compare import compare_with_whole, loan_for, worded
from offbeat.errors import ConfigurationError, unknown
from offbeat.methods.base import require_count
from offbeat.nest import Nest
from offbeat.stages.trial import outputs_of, untouched

Model = nn.Module | Sequence[nn.Module]
Cuts = Sequence[int] | Sequence[str]
Balancing = Callable[[Sequence[nn.Module], Nest, int], list[int]]
"""Where stages begin, for layers, a batch and a number of stages."""


@dataclass(frozen=True)
class Cut:
    """How a model becomes stages; ``places`` is None until the first batch has been weighed."""

    model: nn.Module
    """The unsplit model; the stages share its parameters, so it always holds the newest."""
    stages: int
    places: tuple[int, ...] | None
    given: tuple[nn.Module, ...] | None = None
    trunk: str | None = None
    """The list of blocks to cut, in a model that is no nn.Sequential."""
    paths: tuple[str, ...] | None = None
    """The modules at which stages begin, in a model that is traced; empty to be chosen."""

    @property
    def needs_batch(self) -> bool:
        """Whether the stages can be made only once a batch has been seen."""
        unmade = self.trunk is not None or self.paths is not None
        return self.places is None or (unmade and self.given is None)

    def weighed(self, batch: Nest, balancing: Balancing | None = None) -> "Cut":
        """The same cut with its places decided by what this batch costs; by default counted."""
        if not self.needs_batch:
            return self
        balancing = balancing or counted_cuts
        if self.trunk is not None:
            return self._through_trunk(batch, self.trunk, balancing)
        if self.paths is not None:
            return self._traced(batch, self.paths)
        layers = [module for _, module in _layers(self.model)]
        return replace(self, places=tuple(balancing(layers, batch, self.stages)))

    def _through_trunk(self, batch: Nest, name: str, balancing: Balancing) -> "Cut":
        lent = loan_for(self.model, batch)
        with lent(), untouched([self.model]):
            anatomy = trunk.look_at(self.model, name, batch)
        places = self.places
        if places is None:
            parts = trunk.parts_of(self.model, anatomy)
            with worded(self.model, name):
                places = tuple(balancing(parts, batch, self.stages))
        stages = trunk.stages_of(self.model, anatomy, places)
        compare_with_whole(self.model, stages, batch, name, lent)
        cut = replace(self, places=places, given=tuple(stages))
        _refuse_shared_parameters(cut)
        return cut

    def _traced(self, batch: Nest, paths: tuple[str, ...]) -> "Cut":
        from offbeat.cutting import traced  # torch.export takes seconds to import

        if not paths:
            known = traced.candidates(self.model)
            costs = _costs_from(self.model, known, batch)
            paths = tuple(known[place] for place in balanced_cuts(costs, self.stages))
        lent = loan_for(self.model, batch)
        stages = traced.traced_stages(self.model, paths, batch)
        compare_with_whole(self.model, stages, batch, ", ".join(paths), lent)
        cut = replace(self, places=(), given=tuple(stages), paths=paths)
        _refuse_shared_parameters(cut)
        return cut

    def copied(self) -> "Cut":
        """The same cut of a copy of the model."""
        model, given = deepcopy((self.model, self.given))
        return replace(self, model=model, given=given)

    def modules(self) -> list[nn.Module]:
        if self.given is not None:
            return list(self.given)
        if self.stages == 1:
            several = len(signature(self.model.forward).parameters) > 1
            return [trunk.Whole(self.model) if several else self.model]
        assert self.places is not None
        layers = _layers(self.model)
        ends = [0, *self.places, len(layers)]
        return [nn.Sequential(OrderedDict(layers[start:end])) for start, end in pairwise(ends)]


def order_of_norms(model: nn.Module, stages: Sequence[nn.Module]) -> list[int] | None:
    """Where each trained parameter of ``model``, in its order, comes among those of the stages.

    None if the orders are the same, as they are unless a model registers its modules otherwise than
    it runs them.
    """
    place = {id(p): number for number, p in enumerate(model.parameters())}
    found = [place[id(p)] for stage in stages for p in stage.parameters() if p.requires_grad]
    order = sorted(range(len(found)), key=found.__getitem__)
    return None if order == list(range(len(found))) else order


def plan_cut(
    model: Model,
    *,
    stages: int | None = None,
    cuts: Cuts | None = None,
    ppv: Sequence[int] | None = None,
) -> Cut:
    """Decides, as far as possible without data, where the stages begin."""
    if isinstance(model, nn.Module):
        cut = _cut_module(model, stages, cuts, ppv)
    else:
        cut = _as_given(model, stages, cuts, ppv)
    _refuse_shared_parameters(cut)
    return cut


def _as_given(modules: Sequence[nn.Module], stages: int | None, cuts: object, ppv: object) -> Cut:
    if isinstance(modules, str) or not all(isinstance(m, nn.Module) for m in modules):
        raise ConfigurationError(f"{modules!r}: give an nn.Module or a list of them.")
    if not modules:
        raise ConfigurationError("an empty list of stages: give at least one nn.Module.")
    if cuts is not None or ppv is not None:
        raise ConfigurationError(
            f"a list of {len(modules)} modules is cut already: leave out cuts and ppv, or pass one"
            " nn.Sequential."
        )
    if stages is not None and stages != len(modules):
        raise ConfigurationError(
            f"stages={stages}, but the list has {len(modules)} modules, which are the stages: leave"
            " out stages."
        )
    return Cut(nn.Sequential(*modules), len(modules), (), tuple(modules))


def _cut_module(
    model: nn.Module, stages: int | None, cuts: Cuts | None, ppv: Sequence[int] | None
) -> Cut:
    if cuts is not None and ppv is not None:
        raise ConfigurationError("cuts and ppv both say where to cut: give one of them.")
    given = cuts if cuts is not None else ppv
    _require_places("cuts", cuts, int | str)
    _require_places("ppv", ppv, int)
    if stages is not None:
        require_count("stages", stages)
    if given is not None and stages is not None and stages != len(given) + 1:
        name = "cuts" if cuts is not None else "ppv"
        raise ConfigurationError(
            f"stages={stages} and {name}={list(given)} disagree: {len(given)} cuts make"
            f" {len(given) + 1} stages. Leave out one of the two."
        )
    wanted = len(given) + 1 if given is not None else stages or 1
    if wanted == 1:
        return Cut(model, 1, ())
    # A subclass with a forward of its own is no chain of its children.
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return _cut_trunk(model, wanted, cuts, ppv)
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks:
        warnings.warn(
            "hooks of the model itself are not called: stages call its layers. Register them on"
            " layers.",
            stacklevel=4,
        )
    children = [module for _, module in _layers(model)]
    if wanted > len(children):
        raise ConfigurationError(
            f"{wanted} stages, but the model has {len(children)} layers (children of its"
            f" nn.Sequential): give at most {len(children)} stages."
        )
    if given is None:
        return Cut(model, wanted, None)
    if cuts is not None:
        return Cut(model, wanted, _checked(_children_named(model, cuts), len(children)))
    assert ppv is not None
    return Cut(model, wanted, _checked(_places_of_ppv(children, ppv), len(children)))


def _require_places(name: str, given: Any, kind: Any) -> None:
    sequence = isinstance(given, Sequence) and not isinstance(given, str)
    if given is not None and not (
        sequence and all(isinstance(p, kind) and not isinstance(p, bool) for p in given)
    ):
        raise ConfigurationError(
            f"{name}={given!r}: give a list of the places to cut at, as in {name}=[4, 9]."
        )


def _children_named(model: nn.Module, cuts: Cuts) -> list[int]:
    """Child numbers; a cut may also be the name of a child."""
    names = [name for name, _ in _layers(model)]
    places = []
    for cut in cuts:
        if isinstance(cut, str) and cut not in names:
            raise unknown("child to cut at", cut, names)
        places.append(names.index(cut) if isinstance(cut, str) else cut)
    return places


def _cut_trunk(model: nn.Module, wanted: int, cuts: Cuts | None, ppv: Sequence[int] | None) -> Cut:
    """Cuts a model between the blocks of a ModuleList."""
    if ppv is not None:
        raise ConfigurationError(
            f"ppv counts the layers of an nn.Sequential, and this is a {type(model).__name__}: give"
            " stages=, or cuts= with the paths of the blocks at which stages begin."
        )
    paths = [cut for cut in cuts or () if isinstance(cut, str)]
    if not trunk.is_block(model, paths[0] if paths else None):
        return _cut_by_tracing(model, wanted, cuts)
    name = trunk.find_trunk(model, paths[0] if paths else None)
    blocks = len(list(model.get_submodule(name).children()))
    if wanted > blocks:
        raise ConfigurationError(
            f"{wanted} stages, but {name} has {blocks} blocks: give at most {blocks} stages."
        )
    if cuts is None:
        return Cut(model, wanted, None, trunk=name)
    places = []
    for cut in cuts:
        if isinstance(cut, str) and trunk.find_trunk(model, cut) != name:
            raise ConfigurationError(
                f"cuts: {paths[0]!r} and {cut!r} are blocks of different lists; all stages begin at"
                " blocks of one."
            )
        places.append(int(cut.rpartition(".")[2]) if isinstance(cut, str) else cut)
    return Cut(model, wanted, _checked(places, blocks), trunk=name)


def _cut_by_tracing(model: nn.Module, wanted: int, cuts: Cuts | None) -> Cut:
    from offbeat.cutting import traced

    if cuts is not None:
        traced.check_paths(model, [cut for cut in cuts if isinstance(cut, str)])
        if any(not isinstance(cut, str) for cut in cuts):
            raise ConfigurationError(
                f"cuts={list(cuts)}: this {type(model).__name__} has no numbered children to cut"
                " at; give the paths of modules."
            )
    elif wanted > len(traced.candidates(model)):
        raise ConfigurationError(
            f"{wanted} stages, but this {type(model).__name__} has"
            f" {len(traced.candidates(model))} modules to cut at: give fewer stages, or a list of"
            " modules, one per stage."
        )
    return Cut(model, wanted, None, paths=tuple(map(str, cuts or ())))


def _costs_from(model: nn.Module, paths: Sequence[str], batch: Nest) -> list[float]:
    """Arithmetic from the call of each module to that of the next, in one forward."""
    totals: dict[str, float] = {}
    with _OperationCounter() as counter:
        hooks = [
            model.get_submodule(path).register_forward_pre_hook(
                lambda *_, path=path: totals.setdefault(path, counter.total) and None
            )
            for path in paths
        ]
        try:
            outputs_of([trunk.Whole(model)], batch)
        finally:
            for hook in hooks:
                hook.remove()
        ends = [*(totals.get(path, 0.0) for path in paths[1:]), counter.total]
    begins = [0.0, *ends[:-1]]
    return [max(0.0, end - begin) for begin, end in zip(begins, ends, strict=True)]


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of an nn.Sequential as it runs them: children() would drop repeated ones."""
    return [(name, module) for name, module in model._modules.items() if module is not None]


def _checked(cuts: Sequence[int], layers: int) -> tuple[int, ...]:
    whole = all(isinstance(cut, int) and 0 < cut < layers for cut in cuts)
    if not whole or list(cuts) != sorted(set(cuts)):
        raise ConfigurationError(
            f"cuts={list(cuts)}: each is the child at which the next stage begins, so they rise and"
            f" lie between 1 and {layers - 1} for {layers} children."
        )
    return tuple(cuts)


def _places_of_ppv(children: Sequence[nn.Module], ppv: Sequence[int]) -> list[int]:
    """Child numbers for a pipeline placement vector, which counts weighted layers.

    Layers without weights (activation, pooling, normalisation) stay with the weighted one before.
    """
    weighted = [
        sum(isinstance(module, (_ConvNd, nn.Linear)) for module in child.modules())
        for child in children
    ]
    begins: dict[int, int] = {}  # weighted layers before a child that has some: that child
    seen = 0
    for place, count in enumerate(weighted):
        if count:
            begins[seen] = place
            seen += count
    begins.pop(0, None)
    for layer in ppv:
        if layer not in begins:
            raise ConfigurationError(
                f"ppv={tuple(ppv)}: no stage can end after weighted layer {layer}. Of this model's"
                f" {seen} conv and linear layers a stage can end after"
                f" {', '.join(map(str, begins))}."
            )
    if list(ppv) != sorted(set(ppv)):
        raise ConfigurationError(f"ppv={tuple(ppv)}: the layers must rise.")
    return [begins[layer] for layer in ppv]


def _refuse_shared_parameters(cut: Cut) -> None:
    if cut.needs_batch and (cut.trunk is not None or cut.paths is not None):
        return
    if cut.places is None:
        parts = _layers(cut.model)
    else:
        parts = [(f"stage {k}", module) for k, module in enumerate(cut.modules())]
    owner: dict[int, tuple[str, str]] = {}
    for part, module in parts:
        for name, tensor in [*module.named_parameters(), *_statistics(module)]:
            if id(tensor) in owner and cut.stages > 1:
                other, known_as = owner[id(tensor)]
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "running mean"
                raise ConfigurationError(
                    f"{kind} {name!r} of {part} is {known_as!r} of {other}: stages update their"
                    f" own, so one {kind} cannot belong to two. Untie it, or cut so that both uses"
                    " fall into one stage."
                )
            owner[id(tensor)] = (part, name)


def _statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What BatchNorm and its like write in every forward of training."""
    for path, part in module.named_modules():
        mean = part._buffers.get("running_mean")
        if isinstance(part, _NormBase) and part.training and mean is not None:
            yield f"{path}.running_mean".lstrip("."), mean


# ------------------------------------------------------------------------- counting


def counted_cuts(modules: Sequence[nn.Module], batch: Nest, stages: int) -> list[int]:
    """Where stages begin so that each has as much arithmetic as the others."""
    return balanced_cuts(operation_counts(modules, batch), stages)


def operation_counts(modules: Sequence[nn.Module], batch: Nest) -> list[float]:
    """Arithmetic of each module's forward, counted, not timed: the same on every machine."""
    counts = []
    value = nest.replace(batch, lambda t: t.clone())
    with untouched(modules):
        for module in modules:
            with _OperationCounter() as counter:
                value = module(value)
            counts.append(counter.total)
    return counts


class _OperationCounter(TorchDispatchMode):
    """Matrix products by PyTorch's own formulas; everything else one operation per element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        elif not func.is_view:
            self.total += sum(tensor.numel() for tensor in nest.tensors(result))
        return result
