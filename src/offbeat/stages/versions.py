"""Weight versions: which weights a backward pass finds in a graph that was built updates ago.

Autograd stores references to parameters in the graph, and an optimizer writes them in place. Left
alone, the backward of an older batch would raise, or see weights it should not. Hooks on every
saved tensor decide instead, without copying:

    saved tensor                    kept in the graph              seen by the backward
    ------------------------------  -----------------------------  -------------------------------
    a weight, rule ``current``      the parameter and a view       the newest values
    a weight, rule ``stash``        an alias of today's storage    the values of the forward
    a cast of a weight (autocast)   the same, and the dtype        cast again from the above
    anything else                   itself                         itself

Under ``stash`` the update then writes to fresh storage while something in flight still refers to
the old one (:func:`move_to_fresh_storage`): a copy per version, never per batch.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import nest
from offbeat.errors import StageError
from offbeat.methods.base import Rule
from offbeat.stages.habits import Habits

# A chain of these nodes from a saved tensor to a parameter means: the weight itself, seen
# differently. Autocast makes such chains (TBackward0, ToCopyBackward0, AccumulateGrad).
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze")
)
_CAST = "ToCopyBackward0"


class SavedWeight:
    """A view of a parameter in a graph, rebuilt when the backward asks for it."""

    __slots__ = ("__weakref__", "dtype", "offset", "parameter", "size", "source", "stride")

    def __init__(self, parameter: nn.Parameter, source: Tensor, seen: Tensor) -> None:
        self.parameter = parameter
        self.source = source  # the parameter itself, or an alias of one version of it
        self.dtype = seen.dtype
        self.size, self.stride = seen.size(), seen.stride()
        self.offset = seen.storage_offset()

    def rebuild(self) -> Tensor:
        weight = self.source.detach().to(self.dtype)
        return weight.as_strided(self.size, self.stride, self.offset)


class SavedActivation:
    """Any other tensor of a graph, with the check that autograd leaves out under hooks."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor, checked: bool = True) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version if checked else None

    def rebuild(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise overwritten(self.tensor)
        return self.tensor


def overwritten(tensor: Tensor) -> StageError:
    return StageError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward pass needs was changed by an"
        " in-place operation after it was saved. Use the out-of-place form of the operation; or, if"
        " it is a batch, give every batch memory of its own."
    )


Saved = SavedWeight | SavedActivation
Stashed = Callable[[nn.Parameter], Tensor]


@dataclass(eq=False)
class Graph:
    """What one in-flight graph holds; autograd owns the tensors, this only watches them."""

    weights: set[nn.Parameter] = field(default_factory=set)
    """The parameters its backward will ask for."""
    _saved: list[weakref.ref[Saved]] = field(default_factory=list)

    def add(self, saved: Saved) -> Saved:
        self._saved.append(weakref.ref(saved))
        if isinstance(saved, SavedWeight):
            self.weights.add(saved.parameter)
        return saved

    @property
    def size(self) -> int:
        """How many tensors it saved."""
        return len(self._saved)

    def held(self) -> list[Saved | None]:
        """All it saved, in order; None where autograd has let go of it."""
        return [reference() for reference in self._saved]


@dataclass(eq=False)
class SavedTensors:
    """The hooks of one stage under ``stash`` or ``current``."""

    stage: int
    parameters: Sequence[nn.Parameter]
    rule: Rule
    habits: Habits
    compiled: Sequence[nn.Module]
    """Compiled BatchNorm saves statistics that it writes but does not read, and counts it as a
    change; as it is, it does neither."""

    is_unlike: bool = True
    """Whether the last graph saved more or less than all before it."""
    _inspection: "_Inspection | None" = None
    _inspected: set[tuple[int, int]] = field(default_factory=set)
    """How many tensors, and of how many weights, the graphs saved that were inspected."""

    @contextmanager
    def kept_in(
        self, graph: Graph, inputs: Iterable[Tensor], stashed: Stashed | None = None
    ) -> Iterator[None]:
        """Runs a forward so that the graph it builds follows the rule.

        ``stashed`` gives a weight's values of today a place that outlives the next update; by
        default that is their storage, which the update must then leave alone.
        """
        weights = {
            storage: parameter
            for parameter in self.parameters
            if (storage := parameter.untyped_storage().data_ptr())
        }
        known = {id(parameter) for parameter in self.parameters}
        buffers = {address_of(buffer) for module in self.compiled for buffer in module.buffers()}
        inspection = None if self.habits.inspected else _Inspection(weights, inputs)
        self._inspection = inspection

        def pack(tensor: Tensor) -> Saved:
            if tensor.layout is not torch.strided:
                return graph.add(SavedActivation(tensor))
            parameter = weights.get(tensor.untyped_storage().data_ptr())
            if parameter is None:
                parameter = _cast_from(tensor, known)
            if parameter is not None:
                source: Tensor = parameter
                if self.rule == "stash":
                    source = parameter.detach() if stashed is None else stashed(parameter)
                return graph.add(SavedWeight(parameter, source, tensor))
            if inspection is not None and self.rule == "current":
                self._refuse_derived(inspection.derived_by(tensor), tensor)
            return graph.add(SavedActivation(tensor, checked=address_of(tensor) not in buffers))

        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(pack, lambda saved: saved.rebuild()))
            if inspection is not None:
                inspection.hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
                stack.enter_context(inspection)
            yield
        count = graph.size, len(graph.weights)
        self.is_unlike = count not in self._inspected
        self._inspected.add(count)
        if inspection is not None and inspection.foreign_hooks:
            if self.rule == "current":
                self._refuse_checkpoint("set saved-tensor hooks of their own")
            self.habits.hides = True

    def look_at(self, ends: Iterable[Tensor]) -> None:
        """Ends the inspection of a graph: what custom functions of autograd keep for themselves."""
        for node in nodes_of(ends):
            if node.name() == "CheckpointFunctionBackward":
                self._refuse_checkpoint("use reentrant checkpoints")
            kept: list[Any] = []
            if isinstance(node, BackwardCFunction):
                kept += vars(node).values()
            self.habits.hides |= not all(map(is_constant, kept))
            for tensor in nest.tensors(kept):
                if self.rule == "current" and self._inspection is not None:
                    self._refuse_derived(self._inspection.derived_by(tensor), tensor)
        self._inspection = None
        self.habits.inspected = True

    def _refuse_checkpoint(self, what: str) -> None:
        raise StageError(
            f"stage {self.stage}: its modules {what} (activation checkpointing), so rule"
            f" {self.rule!r} cannot say which weights the backward sees. Use backward='stash' and"
            " checkpoints with use_reentrant=False, which see the weights of the forward; or"
            " backward='recompute', which recomputes the whole stage from its input, without"
            " checkpointing."
        )

    def _refuse_derived(self, operation: str | None, tensor: Tensor) -> None:
        if operation is not None:
            raise StageError(
                f"stage {self.stage}: {operation} computes a tensor of shape"
                f" {tuple(tensor.shape)} from weights alone, and the backward needs it. Rule"
                " 'current' promises the newest weights and cannot compute it again. Use"
                " backward='stash' or backward='recompute'."
            )


class _Inspection(TorchDispatchMode):
    """Watches one forward: which tensors come from weights alone, and who else sets hooks.

    Costs a Python call per operation, so it runs on a stage's first forward only.
    """

    def __init__(self, weights: dict[int, nn.Parameter], inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hooks: Any = None
        self.foreign_hooks = False
        self._weights = weights
        self._data = {address_of(tensor) for tensor in inputs}
        self._derived: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice while we watch

    def derived_by(self, tensor: Tensor) -> str | None:
        return self._derived.get(address_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.foreign_hooks |= top is not None and top != self.hooks
        read = {address_of(tensor) for tensor in nest.tensors([args, kwargs])}
        outputs = nest.tensors(result)
        self._alive += outputs
        made = {address_of(tensor) for tensor in outputs} - read
        if read & self._data:
            self._data |= made
        elif any(storage in self._weights or storage in self._derived for storage in read):
            self._derived |= dict.fromkeys(made, str(func))
        return result


def nodes_of(ends: Iterable[Tensor]) -> Iterator[Node]:
    """The graph that led to these tensors: every node once, always in the same order."""
    nodes = [end.grad_fn for end in ends if end.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        after = dict.fromkeys(n for n, _ in node.next_functions if n is not None and n not in seen)
        seen.update(after)
        nodes += after


def leaves_of(end: Tensor, behind: Iterable[Node | None]) -> list[Tensor]:
    """What a gradient of ``end`` would be gathered in, up to the nodes that lie ``behind`` it.

    It is asked of every loss, so it is written to be quick.
    """
    seen, nodes, leaves = {None, *behind}, [end.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        assert node is not None
        if after := node.next_functions:
            nodes += [n for n, _ in after]
        elif node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
    return leaves


def is_constant(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(is_constant, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _cast_from(tensor: Tensor, known: set[int]) -> nn.Parameter | None:
    """The parameter of which ``tensor`` is a cast copy or a view of one, if it is."""
    node = tensor.grad_fn
    casts = 0
    while node is not None and (node.name() in _VIEWS or node.name() == _CAST):
        casts += node.name() == _CAST
        node = node.next_functions[0][0]
    parameter = getattr(node, "variable", None)
    if casts != 1 or id(parameter) not in known:
        return None
    assert isinstance(parameter, nn.Parameter)
    whole = parameter.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return parameter if whole else None


def overlapping(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, str]]:
    """Names of parameters over the same numbers: one weight, of which versions would be two.

    Where both are frozen nothing changes, so they are left out.
    """
    sharing: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        if is_lazy(parameter) or parameter.layout is not torch.strided:
            continue
        if storage := parameter.untyped_storage().data_ptr():
            sharing.setdefault(storage, []).append((name, parameter))
    for found in sharing.values():
        if len(found) == 1:
            continue
        # Whose each number is: views may be interleaved, as columns are, and yet not overlap.
        least = min(parameter.element_size() for _, parameter in found)
        size = found[0][1].untyped_storage().nbytes() // least
        owner = torch.zeros(size, dtype=torch.int32)
        for number, (name, parameter) in enumerate(found, 1):
            width = parameter.element_size() // least
            own = owner.as_strided(
                (*parameter.size(), width),
                (*(step * width for step in parameter.stride()), 1),
                parameter.storage_offset() * width,
            )
            for other in filter(None, own.unique().tolist()):
                one, first = found[other - 1]
                if first.requires_grad or parameter.requires_grad:
                    yield one, name
            own.fill_(number)


def give_each_its_own(parameters: Sequence[nn.Parameter]) -> None:
    """Moves parameters that are views of a larger tensor out of it.

    The hooks tell a weight by its storage, and a view by where it begins in one.
    """
    move_to_fresh_storage(
        parameter
        for parameter in parameters
        if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size()
    )


def move_to_fresh_storage(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Lets the next in-place update leave the present values alone; returns aliases of them."""
    old = []
    for parameter in parameters:
        old.append(parameter.detach())
        parameter.data = parameter.detach().clone()
    return old


def weights_set_to(
    parameters: Sequence[nn.Parameter], values: Sequence[Tensor] | None
) -> AbstractContextManager[None]:
    """Lends a module other values of its weights; None leaves them as they are."""
    return nullcontext() if values is None else _set_to(parameters, values)


@contextmanager
def _set_to(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    newest = [parameter.data for parameter in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, value in zip(parameters, newest, strict=True):
            parameter.data = value
