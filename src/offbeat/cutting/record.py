"""A forward as PyTorch's own tools record it, divided where the stages begin.

``torch.export`` records what a model computes from tensors of certain shapes; the sizes of rows and
of sequences stay open as far as the model's code allows. Guards tell whether a record is right for
another batch than the one it was made for.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from offbeat import nest
from offbeat.errors import BatchError, ConfigurationError
from offbeat.nest import Nest
from offbeat.rng import generator_states
from offbeat.stages.buffers import WrittenBuffers
from offbeat.stages.trial import call


@dataclass(frozen=True)
class Likeness:
    """All of a batch but its values: what a record is made for."""

    structure: str
    """The nest in words, and the type and number of dimensions of each tensor."""
    shapes: str

    @classmethod
    def of(cls, batch: Nest) -> "Likeness":
        tensors: list[Tensor] = []

        def number(tensor: Tensor) -> int:
            tensors.append(tensor)
            return len(tensors) - 1

        try:
            words = nest.to_words(batch, number)
        except nest.NoWords as error:
            raise BatchError(
                f"x holds {error}, and a traced model takes tensors and plain values in tuples,"
                " lists and dicts: give these."
            ) from None
        kinds = [[nest.dtype_name(tensor.dtype), tensor.dim()] for tensor in tensors]
        return cls(json.dumps([words, kinds]), json.dumps([list(t.shape) for t in tensors]))

    def example(self, device: torch.device) -> tuple[Any, list[Tensor]]:
        """The nest in words, and tensors of zeros for it."""
        words, kinds = json.loads(self.structure)
        shapes = json.loads(self.shapes)
        return words, [
            torch.zeros(shape, dtype=nest.dtype_named(dtype), device=device)
            for (dtype, _), shape in zip(kinds, shapes, strict=True)
        ]


@dataclass(frozen=True)
class Piece:
    """What one stage computes, as a function of its weights and of values by name."""

    code: fx.GraphModule
    weights: list[str]
    """Names in the model of the parameters and buffers that the code takes first."""
    takes: list[str]
    gives: list[str]

    def __call__(self, weights: Sequence[Tensor], values: dict[str, Any]) -> dict[str, Any]:
        results = self.code(*weights, *(values[name] for name in self.takes))
        return dict(zip(self.gives, results, strict=True))


@dataclass(frozen=True, eq=False)
class Record:
    like: Likeness
    inputs: list[str]
    """What the tensors of the batch are called."""
    guards: Callable[..., None]
    pieces: list[Piece]
    output: Nest
    """The model's output, with tensors of no meaning."""
    results: list[str]
    """What the tensors of the output are called."""

    def fits(self, batch: Nest) -> bool:
        """Whether it is right for a batch of the same structure."""
        try:
            self.guards(*nest.tensors(batch))
        except AssertionError:
            return False
        return True

    def needed_after(self, stage: int) -> set[str]:
        return {n for piece in self.pieces[stage + 1 :] for n in piece.takes} | {*self.results}


def record(model: nn.Module, paths: Sequence[str], like: Likeness, device: torch.device) -> Record:
    """Records the model in the mode that it is in, divided where these modules begin."""
    words, example = like.example(device)
    found: list[tuple[Nest, list[str]]] = []
    traced = _Called(model, words, found)
    try:
        try:
            program = _export(traced, paths, example, open_sizes=True)
        except ConfigurationError:
            raise
        except Exception:  # it may be recorded for these sizes alone
            program = _export(traced, paths, example, open_sizes=False)
    except ConfigurationError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"torch.export cannot record this {type(model).__name__}: {reason}. Pass a list of"
            " modules, one per stage."
        ) from error
    output, written = found[-1]
    whole = program.module()
    _write_buffers(whole, written)
    return _divide(model, whole, like, nest.replace(output, lambda _: torch.empty(0)))


def _export(
    traced: "_Called", paths: Sequence[str], example: Sequence[Tensor], *, open_sizes: bool
) -> torch.export.ExportedProgram:
    sizes = tuple(_open_sizes(tensor) if open_sizes else None for tensor in example)
    before = _drawn_by_others()
    buffers = WrittenBuffers([traced.model]).restored()
    with buffers, _splits(traced.model, paths) as called, _alone(example), _quiet():
        program = torch.export.export(
            traced, tuple(example), dynamic_shapes={"tensors": sizes}, strict=False
        )
    if called != list(paths):
        raise ConfigurationError(
            f"cuts={list(paths)}: one forward calls these modules in the order {called}. Give each"
            " path once, in that order, and none that is called twice."
        )
    if _drawn_by_others() != before:
        raise ConfigurationError(
            f"the forward of this {type(traced.model).__name__} draws from Python's or NumPy's"
            " generator, and a record would repeat the same numbers. Draw with torch, or pass a"
            " list of modules, one per stage."
        )
    return program


def _open_sizes(tensor: Tensor) -> dict[int, Any]:
    """Rows, and what may be the length of a sequence; others make recording slow for nothing."""
    sizes = range(min(tensor.dim(), 2 if tensor.dim() < 4 else 1))
    return dict.fromkeys(sizes, torch.export.Dim.AUTO)


def _drawn_by_others() -> Any:
    states = generator_states(torch.device("cpu"))
    return states["python"], states["numpy"][1].tolist(), states["numpy"][2:]


@contextmanager
def _splits(model: nn.Module, paths: Sequence[str]) -> Iterator[list[str]]:
    """Marks in what is recorded where modules are called, and notes their order."""
    from torch.distributed.pipelining import pipe_split  # takes seconds to import

    called: list[str] = []

    def mark(path: str) -> None:
        called.append(path)
        pipe_split()

    with ExitStack() as hooks:
        for path in paths:
            module = model.get_submodule(path)
            hooks.enter_context(
                module.register_forward_pre_hook(lambda *_, path=path: mark(path), prepend=True)
            )
        called.clear()
        yield called


@contextmanager
def _alone(example: Sequence[Tensor]) -> Iterator[None]:
    """Records alike wherever it happens: without casts and anybody's hooks."""
    kinds = {tensor.device.type for tensor in example}
    with ExitStack() as contexts:
        for kind in kinds:
            contexts.enter_context(torch.autocast(kind, enabled=False))
        contexts.enter_context(
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        )
        contexts.enter_context(SingleDraws(0.5))
        contexts.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's own, about its own deprecations
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the graphs that torch prints where it fails: the error says why, in one sentence."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes")


class SingleDraws(TorchFunctionMode):
    """Every ``torch.rand([])`` is this number: what decides nothing need not be drawn."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and args and args[0] in ([], ()):
            return self._number
        return func(*args, **(kwargs or {}))


class _Called(nn.Module):
    """A model as ``torch.export`` is to see it: tensors in, tensors out.

    After those of the output come the buffers that the forward assigned anew, which torch.export
    would lose. ``found`` tells the output and their names.
    """

    def __init__(self, model: nn.Module, words: Any, found: list[tuple[Nest, list[str]]]) -> None:
        super().__init__()
        self.model = model
        self._words, self._found = words, found

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        before = dict(self.model.named_buffers(remove_duplicate=False))
        output = call(self.model, nest.from_words(self._words, tensors))
        stranger = nest.stranger(output)
        if stranger is not None:
            raise ConfigurationError(
                f"this {type(self.model).__name__} returned a {type(stranger).__name__}, in which"
                " tensors could hide. Return tensors, None, numbers and strings in tuples, lists"
                " and dicts."
            )
        written = {
            name: buffer
            for name, buffer in self.model.named_buffers(remove_duplicate=False)
            if buffer is not before[name]
        }
        self._found.append((output, list(written)))
        return *nest.tensors(output), *written.values()


# ------------------------------------------------------------------ dividing


def _divide(model: nn.Module, whole: fx.GraphModule, like: Likeness, output: Nest) -> Record:
    _open_regions(whole)
    own = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    nodes = list(whole.graph.nodes)
    stage_of: dict[fx.Node, int] = {}
    weights: dict[fx.Node, str] = {}
    stage = 0
    for node in nodes:
        if _is_split(node):
            stage += 1
        elif node.op == "get_attr" and id(_attribute(whole, node)) in own:
            weights[node] = own[id(_attribute(whole, node))]
        elif node.op == "call_function":
            stage_of[node] = stage
            if node.target is torch.ops.aten.copy_.default and node.args[0] in weights:
                # What was assigned is written at the end of the record, where its stage is over.
                stage_of[node] = stage_of.get(node.args[1], stage)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (results,) = nodes[-1].args
    pieces = []
    for number in range(stage + 1):
        mine = [node for node in nodes if stage_of.get(node) == number]
        later = {n for other, s in stage_of.items() if s > number for n in other.all_input_nodes}
        gives = [n for n in mine if n in later or n in results]
        if number == stage:
            gives += [n for n in dict.fromkeys(results) if n in weights]
        used = dict.fromkeys(n for node in mine for n in node.all_input_nodes)
        used |= dict.fromkeys(n for n in gives if n in weights)
        known = {n for n, s in stage_of.items() if s < number} | {*inputs}
        held = [n for n in used if n in weights]
        takes = [n for n in used if n in known]
        code = _code(whole, [*held, *takes], mine, gives)
        names = ([n.name for n in ns] for ns in (takes, gives))
        pieces.append(Piece(code, [weights[n] for n in held], *names))
    guards = whole.get_submodule("_guards_fn")
    return Record(like, [n.name for n in inputs], guards, pieces, output, [n.name for n in results])


def _is_split(node: fx.Node) -> bool:
    return node.target is torch.ops.pippy._pipe_split.default


def _open_regions(whole: fx.GraphModule) -> None:
    """Puts a region under ``no_grad``, a graph of its own, in line if a stage begins there.

    What leaves it is detached.
    """
    for node in whole.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled
    ):
        enabled, name, *given = node.args
        inner = list(_attribute(whole, name).graph.nodes)
        if enabled or not any(map(_is_split, inner)):
            continue
        new: dict[fx.Node, fx.Node] = dict(zip(inner, given, strict=False))  # placeholders first
        with whole.graph.inserting_before(node):
            for part in inner[len(given) : -1]:
                new[part] = whole.graph.node_copy(part, new.__getitem__)
                if part.op == "get_attr":
                    new[part].target = f"{name.target}.{part.target}"
            (results,) = inner[-1].args
            for taken in list(node.users):
                outside = torch.ops.aten.detach.default, (new[results[taken.args[1]]],)
                taken.replace_all_uses_with(whole.graph.call_function(*outside))
                whole.graph.erase_node(taken)
        whole.graph.erase_node(node)


def _write_buffers(whole: fx.GraphModule, names: Sequence[str]) -> None:
    """Lets the last results be written into these buffers of the model instead."""
    *_, end = whole.graph.nodes
    (results,) = end.args
    kept = len(results) - len(names)
    with whole.graph.inserting_before(end):
        for name, value in zip(names, results[kept:], strict=True):
            buffer = whole.graph.get_attr(f"model.{name}")
            whole.graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
    end.args = (results[:kept],)


def _attribute(whole: fx.GraphModule, node: fx.Node) -> Any:
    owner, _, key = str(node.target).rpartition(".")
    return getattr(whole.get_submodule(owner), key)


def _code(
    whole: fx.GraphModule,
    takes: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    gives: Sequence[fx.Node],
) -> fx.GraphModule:
    """A function of these values, in the order of the record."""
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in takes}
    for node in nodes:
        for constant in node.all_input_nodes:
            if constant not in new:  # a constant, or the graph of a region without gradients
                new[constant] = graph.node_copy(constant)
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in gives))
    for node in graph.nodes:
        node.meta.clear()  # the tensors that were recorded with
    return fx.GraphModule(whole, graph)
