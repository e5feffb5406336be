"""The part of a model that one stage runs: a forward with its loss, and the graph of one."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offbeat import nest
from offbeat.errors import IncompleteModel, StageError
from offbeat.methods.base import Rule
from offbeat.nest import Bundle, Nest, is_dense
from offbeat.rng import keyed, seed_for
from offbeat.stages.attributes import HOOKS, Attributes, Change
from offbeat.stages.buffers import WrittenBuffers
from offbeat.stages.compiled import Compiled
from offbeat.stages.draws import Draws
from offbeat.stages.fill import Fill
from offbeat.stages.flight import Work
from offbeat.stages.habits import Habits
from offbeat.stages.lanes import NotRecordable
from offbeat.stages.relay import Relay
from offbeat.stages.versions import SavedTensors, leaves_of

Loss = Callable[[Nest, Nest], Tensor]
Penalty = Callable[[list[tuple[str, nn.Parameter]]], Tensor | float]
"""A sum over weights, of those it is given with their names."""


class Network:
    """``loss`` is set where one is computed: at the last stage, and with ``head`` in DGL."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        *,
        seed: int,
        device: torch.device,
        replica: int = 0,
        loss: Loss | None = None,
        head: nn.Module | None = None,
        autocast: torch.dtype | None = None,
        compile: bool = False,
        names: Mapping[int, str] = MappingProxyType({}),
        penalty: Penalty | None = None,
    ) -> None:
        """``names``: of all parameters of the unsplit model, by id."""
        self.index = index
        self.module = module
        self.head = head
        self.device = device
        self.replica = replica
        self.modules = [module] if head is None else [module, head]
        self.parameters = [p for m in self.modules for p in m.parameters()]
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.of_model = sum(p.requires_grad for p in module.parameters())
        """How many of these, from the first on, are the model's; the rest are the head's."""
        self.shared = module.own_weights() if isinstance(module, Relay) else []
        """Those that later stages use, too: their values are part of what is sent."""
        self._sent: dict[Tensor, Tensor] = {}
        """Of these the values that were sent last: one tensor for as long as they are the same."""
        self.keeps_place = False
        """Whether updates write where the weights lie, so that what is sent has to be a copy."""
        self.names = {id(p): n for m in self.modules for n, p in m.named_parameters()}
        self.names.update(names)
        """What parameters are called in messages."""
        self._own = {id(parameter) for parameter in self.parameters}
        self._penalty = penalty
        self._named = [(self.names[id(p)], p) for p in module.parameters()]
        self.habits = Habits()
        self.buffers = WrittenBuffers(self.modules, self.habits)
        self._is_compiled = compile
        self._compile()
        self._draws = Draws(index, self.modules, device, self.habits)
        self._loss = loss
        self._seed = seed
        self._autocast = autocast
        self.begin(Fill(), 1.0)

    def _compile(self) -> None:
        self._compiled: Callable[[Nest], Nest] = self.module
        if self._is_compiled and isinstance(self.module, Relay):
            self._compiled = partial(self.module.run, Compiled(self.index, self.module.module))
        elif self._is_compiled:
            self._compiled = Compiled(self.index, self.module)

    def begin(self, fill: Fill, shrink: float) -> None:
        """``shrink``: the factor on every gradient that arrives, corrections included."""
        self.rule: Rule | None = None if fill.plain else fill.rule
        """Which weights a backward sees; None where they are the same anyway."""
        self.local_loss = fill.local_loss
        self._first_batch, self._parts = fill.first_batch, fill.micro_batches
        self._shrink = shrink
        self.forget_sent()
        compiled = self.modules if self._is_compiled else ()
        self.habits.inspected = self.habits.hides = False
        self.saved = SavedTensors(self.index, self.parameters, fill.rule, self.habits, compiled)

    def look_again(self, changes: Sequence[Change]) -> None:
        self.habits.forget()
        self._draws.forget()
        if not all(change.is_number for change in changes):  # which decide on no branch, as a rule
            self.habits.inspected = self.habits.hides = False
        # Compiled code asks for attributes itself, and never for hooks.
        if any(change.part in HOOKS for change in changes):
            self._compile()

    def forward(
        self, batch: int | None, work: Work, given: Nest, *, graph: bool
    ) -> tuple[Nest, Tensor | None]:
        """What travels on, and the loss if there is one; ``work`` keeps the ``graph``."""
        if batch is not None:
            work.penalized = self.penalizes(batch)
        run = self.build_graph if graph else self.run
        output, loss = run(batch, work, given)
        return self._outgoing(output, given), None if loss is None else loss.detach()

    def run(self, batch: int | None, work: Work, given: Nest) -> tuple[Nest, Tensor | None]:
        """One forward: the output, and the loss if there is one.

        ``batch`` decides the random numbers; None leaves them to the caller.
        """
        random: AbstractContextManager[None] = nullcontext()
        if batch is not None:
            again = self.rule == "recompute" and not torch.is_grad_enabled()
            seed, lent = self.seed_of(batch), self._is_compiled
            if threading.active_count() == 1:  # nobody else can draw
                random = keyed(seed, self.device, self.habits, work, again=again)
            else:
                forward = partial(self._try, work, given)
                random = self._draws.keyed(seed, work, given, forward, again=again, lent=lent)
        with random:
            with precision(self.device, self._autocast):
                output = self._call(given, work.inputs or nest.tensors(given))
                if not isinstance(output, Tensor):
                    self._refuse_hidden_tensors(output)
                loss = self._compute_loss(output, given, work.target)
            if work.penalized and torch.is_grad_enabled():
                work.penalty = self._compute_penalty()
            return output, loss

    def _try(self, work: Work, given: Nest) -> None:
        """A forward for nothing, as far as random numbers can be drawn in it."""
        with precision(self.device, self._autocast):
            output = self.module(nest.copied(given))
            self._compute_loss(output, given, work.target)

    def _refuse_hidden_tensors(self, output: Nest) -> None:
        words = f"stage {self.index} ({_describe(self.module)}) returned"
        if not nest.tensors(output):
            raise StageError(
                f"{words} {type(output).__name__} without a tensor in it. A stage must return a"
                " tensor or a nest (tuple, list, dict) with at least one."
            )
        stranger = nest.stranger(output)
        if stranger is not None:
            raise StageError(
                f"{words} a {type(stranger).__name__}, in which tensors could hide from the"
                " boundary between stages. Return tensors, None, numbers and strings in tuples,"
                " lists and dicts."
            )

    def build_graph(self, batch: int | None, work: Work, given: Nest) -> tuple[Nest, Tensor | None]:
        """One forward of which ``work`` keeps the graph."""
        work.leaves = nest.detached(given)
        work.inputs = nest.tensors(work.leaves)
        watched: AbstractContextManager[None] = nullcontext()
        if self.rule in ("stash", "current"):
            watched = self.saved.kept_in(work.graph, work.inputs, work.stashed)
        with watched:
            output, work.loss = self.run(batch, work, work.leaves)
        work.outputs = nest.tensors(output)
        if work.loss is not None and not work.loss.requires_grad:
            raise StageError(
                "the loss does not depend on the output of the model, or on nothing in it that is"
                " trained: compute it from the output, without detach(), item() or no_grad()."
            )
        if self.rule in ("stash", "current"):
            self._inspect(batch, work, given)
        return output, work.loss

    def _inspect(self, batch: int | None, work: Work, given: Nest) -> None:
        """Looks at a graph unlike those before it, and lets one that hides weights keep them all.

        A backward that finds all weights as its forward saw them cannot see others.
        """
        first = not self.habits.inspected
        if first:
            ends = [end for end in (work.loss, work.penalty) if end is not None]
            self.saved.look_at([*work.outputs, *ends])
        if self.saved.is_unlike and not first:
            self._inspect_again(batch, work, given)
        if self.rule == "stash" and self.habits.hides:
            stashed = work.stashed or Tensor.detach
            work.copies |= {parameter: stashed(parameter) for parameter in self.trainable}
            work.graph.weights |= set(self.trainable)
            work.hides = True

    def _inspect_again(self, batch: int | None, work: Work, given: Nest) -> None:
        """Runs the forward once more, for nothing, so that all its operations are seen."""
        if batch is None:
            raise NotRecordable("a forward that saves other tensors than those before it")
        attributes = Attributes(self.modules)
        spare = Work(target=work.target, scale=work.scale, penalized=work.penalized)
        self.habits.inspected = False
        with WrittenBuffers(self.modules).restored():
            self.build_graph(batch, spare, given)
        attributes.put_back()
        alike = spare.graph.size == work.graph.size
        if alike or self._is_compiled:  # which is not what is inspected
            return
        if self.rule == "current":
            raise StageError(
                f"stage {self.index}: run twice on one batch, its forward saves"
                f" {work.graph.size} tensors and then {spare.graph.size}, so it cannot be said"
                " which weights its backward sees. Rule 'current' promises the"
                " newest. Use backward='stash', which keeps all weights, or backward='recompute'."
            )
        self.habits.hides = True

    def show_graph(self, batch: int, given: Nest) -> None:
        """Runs a forward once more, for nothing, to whoever keeps features of it for a loss.

        Without a graph they would be taken for constants there.
        """
        with WrittenBuffers(self.modules).restored(), torch.enable_grad():
            self.run(batch, Work(), nest.detached(given))

    def backward(self, work: Work, gradients: Sequence[Tensor | None]) -> None:
        """Adds to the gradients of weights and inputs where they are gathered."""
        outputs, starts = self.starts(work, gradients)
        with self.lent_again(work):
            if outputs:
                torch.autograd.backward(outputs, starts)

    def lent_again(self, work: Work) -> AbstractContextManager[None]:
        """For a backward that runs forwards again, which read weights of earlier stages."""
        return self.module.lent(work.leaves) if isinstance(self.module, Relay) else nullcontext()

    def seed_of(self, batch: int) -> int:
        return seed_for(self._seed, replica=self.replica, stage=self.index, micro_batch=batch)

    def _call(self, given: Nest, inputs: Sequence[Tensor]) -> Nest:
        """Calls the module so that a layer that writes in place spoils nobody's tensor.

        The first call works on a copy and looks whether the module wrote into it; only modules that
        do go on paying for a copy. ``inputs``: the tensors of what is ``given``.
        """
        passed = given
        if self.habits.inputs_changed is not False:
            passed = nest.copied(given)
            before, inputs = inputs, nest.tensors(passed)
            if not torch.is_grad_enabled():  # matmul goes by the flag all the same
                for copy, tensor in zip(inputs, before, strict=True):
                    copy.requires_grad_(tensor.requires_grad)
        versions = _writes(inputs)
        # Compiled code would hide its operations from the inspection of a first graph.
        inspected = self.rule in (None, "recompute") or self.habits.inspected
        output = self._compiled(passed) if inspected else self.module(passed)
        changed = versions != _writes(inputs)
        if changed and self.habits.inputs_changed is False:
            raise StageError(
                f"stage {self.index} ({_describe(self.module)}) began to change its input in place"
                " after its first batch. Use the out-of-place form of that operation."
            )
        if self.habits.inputs_changed is None:
            self.habits.inputs_changed = changed
        return output

    @property
    def has_loss(self) -> bool:
        """Whether one is computed here."""
        return self._loss is not None and (self.head is None or self.local_loss)

    def _compute_loss(self, output: Nest, given: Nest, target: Nest) -> Tensor | None:
        if not self.has_loss:
            return None
        assert self._loss is not None
        behind = {tensor.grad_fn for tensor in nest.tensors(output)}  # it may write in place
        try:
            loss = self._loss(output if self.head is None else self.head(output), target)
        except IncompleteModel as error:
            raise self._beyond("a weight or buffer of another stage") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise StageError(
                f"the loss must return one floating-point number as a tensor; it returned"
                f" {found}. Reduce it, for example with reduction='mean' or .mean()."
            )
        for leaf in leaves_of(loss, behind):
            if id(leaf) not in self._own:
                self._refuse_beyond(leaf, nest.tensors([given, target]))
        return loss

    def penalizes(self, batch: int) -> bool:
        """Whether this micro-batch brings the penalty: the first of each batch does."""
        return self._penalty is not None and (batch - self._first_batch) % self._parts == 0

    def _compute_penalty(self) -> Tensor | None:
        """The penalty on this stage's weights, in a graph of its own; None without a gradient."""
        assert self._penalty is not None
        try:
            value = self._penalty(self._named.copy())
        except IncompleteModel as error:
            raise _own_only("a weight of another stage", self.index) from error
        if not isinstance(value, Tensor):  # such as sum() of nothing
            return None
        for leaf in leaves_of(value, ()):
            if id(leaf) not in self._own:
                raise _own_only(self._describe_leaf(leaf), self.index)
        return value if value.requires_grad else None

    def _refuse_beyond(self, leaf: Tensor, arguments: Iterable[Tensor]) -> None:
        """Refuses a leaf of the loss's graph that is no weight of this stage."""
        if any(leaf is argument for argument in arguments):
            return
        raise self._beyond(self._describe_leaf(leaf))

    def _describe_leaf(self, leaf: Tensor) -> str:
        known = self.names.get(id(leaf))
        what = "a trained tensor" if known is None else repr(known)
        return f"{what} of shape {tuple(leaf.shape)}"

    def _beyond(self, what: str) -> StageError:
        return StageError(
            f"the loss depends on {what}, which is no weight of stage {self.index}, where the loss"
            " is computed: its gradient would be lost, or come at another time than its own"
            " stage's. A penalty on weights: Trainer(penalty=...). Features of other stages: let"
            " the model return them with its output. Weights of the loss itself: put them into the"
            " last stage, or call requires_grad_(False) if they are not trained."
        )

    def predict(self, given: Nest, state: dict[str, Tensor]) -> Nest:
        """Runs the module alone with these weights and buffers: for evaluation."""
        with torch.no_grad(), precision(self.device, self._autocast):
            return nest.replace(functional_call(self.module, state, (given,)), without_holes)

    def _outgoing(self, output: Nest, given: Nest) -> Nest:
        """Detached tensors for the next stage, marked where a gradient should come back."""
        needed = not self.local_loss and (
            bool(self.trainable) or any(t.requires_grad for t in nest.tensors(given))
        )

        def sent(tensor: Tensor) -> Tensor:
            # Without a graph (recompute) any floating-point output may turn out to need one.
            wanted = tensor.requires_grad or (
                self.rule == "recompute" and (tensor.is_floating_point() or tensor.is_complex())
            )
            base = tensor._base
            root = tensor if base is None else base
            # A weight itself: the next update would write into what is under way.
            values = tensor.detach().clone() if id(root) in self._own else tensor.detach()
            return without_holes(values).requires_grad_(needed and wanted)

        if isinstance(output, Bundle):  # a tie that only passes stays the tensor that it is
            known = given.ties if isinstance(given, Bundle) else {}
            ties = {
                name: known[name] if name in known else self._values_sent(tie)
                for name, tie in output.ties.items()
            }
            return Bundle(nest.replace(output.given, sent), ties)
        return nest.replace(output, sent)

    def _values_sent(self, weight: Tensor) -> Tensor:
        """What a forward has read of a weight, where the next update leaves it alone."""
        values = self._sent.get(weight)
        if values is None or values.data_ptr() != weight.data_ptr():
            # Not detach(): updates of the weight would count as changes of what was sent.
            values = weight.data.clone() if self.keeps_place else without_holes(weight.data)
            if not self.keeps_place:
                self._sent[weight] = values
        return values.requires_grad_(weight.requires_grad)

    def forget_sent(self) -> None:
        """Weights are written: what has been sent of them are other values."""
        self._sent.clear()

    def starts(
        self, work: Work, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where a backward begins, and with which gradients."""
        pairs: list[tuple[Tensor, Tensor | None]] = []
        if work.scale == 0.0:  # times zero, a loss that is no number would still be none
            pass
        elif work.loss is not None:
            start = None if work.scale == 1.0 else torch.full_like(work.loss, work.scale)
            if work.scale_at is not None:
                start = work.scale_at.to(work.loss.dtype).expand_as(work.loss)
            pairs = [(work.loss, start)]
        else:
            pairs = [
                (output, gradient if self._shrink == 1.0 else gradient * self._shrink)
                for output, gradient in zip(work.outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
        if work.penalty is not None:
            pairs.append((work.penalty, None))
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _own_only(what: str, stage: int) -> StageError:
    return StageError(
        f"the penalty of stage {stage} depends on {what}: it is called once for every stage, with"
        " that stage's weights. Compute it from its argument, as in penalty=lambda named: 1e-4 *"
        " sum(p.square().sum() for name, p in named)."
    )


def precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """The context every forward runs in."""
    if autocast is None:
        return nullcontext()
    # The cache would keep the weights' casts across an update inside one context.
    return torch.autocast(device.type, dtype=autocast, cache_enabled=False)


def _writes(tensors: Iterable[Tensor]) -> list[int]:
    """How often each has been written in place."""
    return [tensor._version for tensor in tensors]


def without_holes(tensor: Tensor) -> Tensor:
    """The tensor in the layout in which it would arrive in another process."""
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def _describe(module: nn.Module) -> str:
    names = [type(child).__name__ for child in module.children()] or [type(module).__name__]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
