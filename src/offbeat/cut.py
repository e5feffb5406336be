"""Cutting a model into stages: as given, at child numbers, at weighted layers, or by cost."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from offbeat import nest, trunk
from offbeat.buffers import WrittenBuffers
from offbeat.errors import ConfigurationError, OffbeatError, unknown
from offbeat.methods.base import require_count
from offbeat.nest import Nest
from offbeat.partition import balanced_cuts
from offbeat.rng import seeded

Model = nn.Module | Sequence[nn.Module]
Cuts = Sequence[int] | Sequence[str]
Balancing = Callable[[Sequence[nn.Module], Nest, int], list[int]]
"""Where stages begin, for layers, a batch and a number of stages."""
Loan = Callable[[], AbstractContextManager[None]]
"""Lends a model random weights, or nothing where it does not run on them."""


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
        lent = _random_weights(self.model, batch)
        with lent(), untouched([self.model]):
            anatomy = trunk.look_at(self.model, name, batch)
        places = self.places
        if places is None:
            parts = trunk.parts_of(self.model, anatomy)
            with _worded(self.model, name):
                places = tuple(balancing(parts, batch, self.stages))
        stages = trunk.stages_of(self.model, anatomy, places)
        _check_against_whole(self.model, stages, batch, name, lent)
        _refuse_shared_buffers(self.model, stages, batch)
        cut = replace(self, places=places, given=tuple(stages))
        _refuse_shared_parameters(cut)
        return cut

    def _traced(self, batch: Nest, paths: tuple[str, ...]) -> "Cut":
        from offbeat import traced  # torch.export takes seconds to import

        if not paths:
            known = traced.candidates(self.model)
            costs = _costs_from(self.model, known, batch)
            paths = tuple(known[place] for place in balanced_cuts(costs, self.stages))
        lent = _random_weights(self.model, batch)
        stages = traced.traced_stages(self.model, paths, batch)
        _check_against_whole(self.model, stages, batch, ", ".join(paths), lent)
        _refuse_shared_buffers(self.model, stages, batch)
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
    from offbeat import traced

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


def _check_against_whole(
    model: nn.Module, stages: Sequence[nn.Module], batch: Nest, name: str, lent: Loan
) -> None:
    """Refuses stages that do not compute what the whole model does."""
    _refuse_other_outputs(model, stages, batch, name)
    with lent():  # zeros at the start hide what is used
        _refuse_other_outputs(model, stages, batch, name)
        _refuse_other_gradients(model, stages, batch, name)


def _refuse_other_outputs(
    model: nn.Module, stages: Sequence[nn.Module], batch: Nest, name: str
) -> None:
    for training in (True, False):
        with _mode(model, training):
            wanted = outputs_of([trunk.Whole(model)], batch)[-1]
            with _worded(model, name):
                found = outputs_of(stages, batch)[-1]
        if not trunk.same_values(found, wanted):
            raise ConfigurationError(
                f"cut at {name}, this {type(model).__name__} computes something else than in one"
                f" piece {'in training' if training else 'in evaluation'}: {_UNSEEN}"
            )


def _refuse_other_gradients(
    model: nn.Module, stages: Sequence[nn.Module], batch: Nest, name: str
) -> None:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    try:
        with _mode(model, training=True):
            whole, cut = (_gradients(m, batch, trained) for m in ([trunk.Whole(model)], stages))
    except Exception:  # reentrant checkpoints cannot be asked, and memory may not suffice for it
        return
    other = _other_gradient(whole, cut)
    if other is not None:
        raise ConfigurationError(
            f"cut at {name}, parameter {other!r} of this {type(model).__name__} gets another"
            f" gradient than in one piece: {_UNSEEN}"
        )


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    with trunk.modes_kept(model):
        trunk.set_mode(model, training=training)
        yield


@contextmanager
def _worded(model: nn.Module, name: str) -> Iterator[None]:
    """Gives words to whatever the pieces of a model raise and the whole does not."""
    try:
        yield
    except OffbeatError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"cut at {name}, this {type(model).__name__} fails where it does not in one piece"
            f" ({type(error).__name__}: {error}). Pass a list of modules, one per stage."
        ) from error


_UNSEEN = (
    "a later part uses something of an earlier one that cannot be seen from outside. Pass a list of"
    " modules, one per stage."
)


def _random_weights(model: nn.Module, batch: Nest) -> Loan:
    """Lends random weights to a model that runs on them; to another nothing."""
    whole = [trunk.Whole(model)]
    outputs_of(whole, batch)  # what begins with the first batch begins at the model's own weights
    try:
        with trunk.random_weights(model):
            for training in (True, False):
                with _mode(model, training):
                    outputs_of(whole, batch)
    except Exception:  # whatever a model may ask of its weights
        return nullcontext
    return partial(trunk.random_weights, model)


@dataclass(frozen=True)
class _Gradient:
    """What is kept of a gradient to compare it: all of them, twice, would take much memory."""

    norm: float
    projection: float
    """On a random direction: it differs where gradients of one norm do."""
    rounding: float


_NO_GRADIENT = _Gradient(0.0, 0.0, 0.0)


def _gradients(
    modules: Sequence[nn.Module], batch: Nest, trained: dict[str, nn.Parameter]
) -> dict[str, _Gradient]:
    """The gradient of some function of all outputs, by name; none where it is not connected."""
    value = nest.replace(batch, lambda t: t.clone())
    with untouched(modules), torch.enable_grad():
        for module in modules:
            value = module(value)
        outputs = [tensor for tensor in nest.tensors(value) if tensor.requires_grad]
        if not outputs or not trained:
            return {}
        found = torch.autograd.grad(
            outputs,
            list(trained.values()),
            # Unlike for each element, since the sum of a normalised output says nothing.
            [torch.linspace(1, 2, t.numel()).to(t).view(t.shape) for t in outputs],
            allow_unused=True,
        )
    return {
        name: _summary(gradient.to_dense(), seed)
        for seed, (name, gradient) in enumerate(zip(trained, found, strict=True))
        if gradient is not None
    }


def _summary(gradient: Tensor, seed: int) -> _Gradient:
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    wide = torch.promote_types(values.dtype, torch.float32)
    generator = torch.Generator(values.device).manual_seed(seed)
    direction = torch.empty(values.shape, dtype=wide, device=values.device)
    direction.uniform_(-1, 1, generator=generator)
    return _Gradient(
        norm=float(torch.linalg.vector_norm(values, dtype=wide)),
        projection=float(direction.mul_(values).sum()),
        rounding=torch.finfo(values.dtype).eps,
    )


def _other_gradient(whole: dict[str, _Gradient], cut: dict[str, _Gradient]) -> str | None:
    """The first parameter whose gradients differ by more than the order of additions explains."""
    norms = [gradient.norm for gradient in whole.values()]
    largest = max(filter(isfinite, norms), default=0.0)
    for name in {**whole, **cut}:
        one, other = whole.get(name, _NO_GRADIENT), cut.get(name, _NO_GRADIENT)
        rounding = max(one.rounding, other.rounding)
        allowed = rounding**0.5 * one.norm + 100 * rounding * largest
        apart = max(abs(one.norm - other.norm), abs(one.projection - other.projection))
        if isfinite(one.norm) and not apart <= allowed:
            return name
    return None


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


def _refuse_shared_buffers(model: nn.Module, stages: Sequence[nn.Module], batch: Nest) -> None:
    """What a forward of training writes belongs to one stage; what it reads, to any number."""
    holders: dict[int, list[int]] = {}
    for stage, module in enumerate(stages):
        for buffer in module.buffers():
            holders.setdefault(id(buffer), []).append(stage)
    shared = {n: b for n, b in model.named_buffers() if len(holders.get(id(b), ())) > 1}
    if not shared:
        return
    with untouched([model]), _mode(model, training=True):
        before = {name: buffer.clone() for name, buffer in shared.items()}
        trunk.call(model, nest.replace(batch, lambda t: t.clone()))
        for name, buffer in shared.items():
            if model.get_buffer(name) is buffer and trunk.same_values(buffer, before[name]):
                continue
            *others, last = holders[id(buffer)]
            raise ConfigurationError(
                f"buffer {name!r} of this {type(model).__name__} is written in training and lies in"
                f" stages {', '.join(map(str, others))} and {last}: stages write their own, so what"
                " one writes the others do not see. Give each stage a buffer of its own, or cut so"
                " that all its uses fall into one stage."
            )


def _statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What BatchNorm and its like write in every forward of training."""
    for path, part in module.named_modules():
        mean = part._buffers.get("running_mean")
        if isinstance(part, _NormBase) and part.training and mean is not None:
            yield f"{path}.running_mean".lstrip("."), mean


# ------------------------------------------------------------------------- looking without touching


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
