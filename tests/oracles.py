"""What the papers say, naively: one oracle per method, to test a pipeline engine against.

Each oracle is written from the equation in its docstring, that of the papers named there, and
shares nothing with the library. It keeps EVERY
version of the weights in a plain list, `versions[v]` being W_k[v], the weights of stage k after
v updates, and indexes that list with the paper's time indices. So it needs no clever engine: no
queues, no ticks and no fill or drain. With m_k the lag of stage k and M micro-batches per update,
micro-batch i (counted over all batches)

    goes forward  through stage k at W_k[max(0, i - m_k) // M],
    goes backward through stage k when it stands at W_k[i // M],

and both versions exist once the micro-batches before i are done. One loop over i is enough.

Every oracle takes stages (left as they are: it works on copies), batches, a loss and a function
that makes an optimizer from a list of parameters, and returns each stage's final parameters after
every batch was applied exactly once. Every parameter trains; there is no randomness in a stage.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class _Stage:
    """A copy of one stage, its optimizer, and all the versions its weights have had."""

    def __init__(
        self, module: nn.Module, optimizer: MakeOptimizer, head: nn.Module | None = None
    ) -> None:
        self.module = copy.deepcopy(module)
        self.head = copy.deepcopy(head)
        self.names = [name for name, _ in self.module.named_parameters()]
        self.live: list[Tensor] = list(self.module.parameters())
        if self.head is not None:
            self.live += list(self.head.parameters())
        self.optimizer = optimizer(self.live) if self.live else None
        self.versions = [[p.detach().clone() for p in self.live]]

    def leaves(self, version: int) -> list[Tensor]:
        """W_k[version], as fresh leaves of a new graph."""
        return [w.clone().requires_grad_() for w in self.versions[version]]

    def forward(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """The stage as a function of any weights."""
        named = dict(zip(self.names, weights, strict=True))
        output: Tensor = torch.func.functional_call(self.module, named, (x,))
        return output

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Sum one micro-batch's gradients into the group's."""
        for p, g in zip(self.live, gradients, strict=True):
            p.grad = g.clone() if p.grad is None else p.grad + g

    def update(self) -> None:
        """W_k[u+1] = Opt(W_k[u], g_k(u)), remembered."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.versions.append([p.detach().clone() for p in self.live])

    def final(self) -> list[Tensor]:
        """The newest weights of the stage, without those of its head."""
        return self.versions[-1][: len(self.names)]


Weigh = Callable[[Tensor, Tensor], float]
"""What a micro-batch counts among those of its batch."""


def _rows(x: Tensor, _y: Tensor) -> float:
    return len(x)


def _micro_batches(
    batches: Sequence[Batch], accumulate: int, reduction: str = "mean", weigh: Weigh = _rows
) -> list[tuple[Tensor, Tensor, float]]:
    """All micro-batches in order: inputs, targets and the factor of the loss."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    pieces = []
    for x, y in batches:
        if len(x) < accumulate:
            raise ValueError(f"{len(x)} rows cannot make {accumulate} micro-batches")
        parts = list(zip(x.tensor_split(accumulate), y.tensor_split(accumulate), strict=True))
        weights = [weigh(*part) for part in parts]
        for (xs, ys), weight in zip(parts, weights, strict=True):
            pieces.append((xs, ys, weight / sum(weights) if reduction == "mean" else 1.0))
    return pieces


def _scaled(value: Tensor, share: float) -> Tensor:
    """The loss times its share of the rows; untouched when the share is everything."""
    return value if share == 1.0 else value * share


def _leaf(x: Tensor) -> Tensor:
    """A stage's input cut from the stage below (token indices have no gradient)."""
    return x.detach().requires_grad_(x.is_floating_point())


def _chain_rule(
    output: Tensor, error: Tensor | None, weights: list[Tensor], x: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of the weights and of the input; `error` is None where output is the loss."""
    if not x.requires_grad:
        return list(torch.autograd.grad(output, weights, error)), None
    *own, down = torch.autograd.grad(output, [*weights, x], error)
    return own, down


def bp(
    stages: list[nn.Sequential],
    batches: list[Batch],
    loss: Loss,
    optimizer: MakeOptimizer,
    accumulate: int = 1,
) -> list[list[Tensor]]:
    """Plain back-propagation through the whole network: W[u+1] = Opt(W[u], g(W[u])).

    GPipe (arXiv 1811.06965) and 1F1B with a flush (arXiv 2006.09503) equal it.
    """
    copies = [_Stage(stage, optimizer) for stage in stages]
    network = nn.Sequential(*[stage.module for stage in copies])
    for batch in batches:
        for x, y, share in _micro_batches([batch], accumulate):
            torch.autograd.backward(_scaled(loss(network(x), y), share))
        for stage in copies:
            stage.update()
    return [stage.final() for stage in copies]


def stash(
    stages: list[nn.Sequential],
    batches: list[Batch],
    loss: Loss,
    optimizer: MakeOptimizer,
    lags: list[int],
    accumulate: int = 1,
    beta: float = 1.0,
    reduction: str = "mean",
    weigh: Weigh = _rows,
) -> list[list[Tensor]]:
    """PipeDream, DDG, FDG, ADL: exact gradient at the weights each stage read going forward.

    arXiv 1806.03377, 1804.10574, 1906.09108 and 2012.03747. m_k = K-1-k in the first two, 2(K-1-k)
    in the others.

    g_k(i) is the gradient at the point (.., W_k[max(0, i - m_k) // M], ..), applied to W_k[i // M].
    FDG multiplies the incoming error gradient by beta in every stage but the last. The authors'
    ADL sums over the M micro-batches (reduction="sum": no loss is scaled).
    """
    copies = [_Stage(stage, optimizer) for stage in stages]
    parts = _micro_batches(batches, accumulate, reduction, weigh)
    for i, (x, y, share) in enumerate(parts):
        h, inputs, outputs, weights = x, [], [], []
        for stage, lag in zip(copies, lags, strict=True):
            weights.append(stage.leaves(max(0, i - lag) // accumulate))
            inputs.append(_leaf(h))
            h = stage.forward(weights[-1], inputs[-1])
            outputs.append(h)
        outputs[-1] = _scaled(loss(h, y), share)
        error = None
        for k in reversed(range(len(copies))):
            if error is not None:
                error = beta * error
            own, error = _chain_rule(outputs[k], error, weights[k], inputs[k])
            copies[k].add(own)
            if (i + 1) % accumulate == 0:
                copies[k].update()
    return [stage.final() for stage in copies]


def _forward_by_hand(
    stage: nn.Sequential, weights: list[Tensor], x: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The stage's output, and all its activations: the input, then each layer's output."""
    left, activations = list(weights), [x]
    for layer in stage:
        if isinstance(layer, nn.Linear):
            x = x @ left.pop(0).T
            if layer.bias is not None:
                x = x + left.pop(0)
        elif isinstance(layer, nn.Tanh):
            x = x.tanh()
        elif isinstance(layer, nn.ReLU):
            x = x.clamp(min=0)
        else:
            raise TypeError(f"no hand-written backward for {type(layer).__name__}")
        activations.append(x)
    return x, activations


def _backward_by_hand(
    stage: nn.Sequential, weights: list[Tensor], activations: list[Tensor], g: Tensor
) -> tuple[list[Tensor], Tensor]:
    """The same layers from the top down, with these weights and those activations."""
    left, gradients = list(weights), []
    for n, layer in reversed(list(enumerate(stage))):
        x, a = activations[n], activations[n + 1]
        if isinstance(layer, nn.Linear):
            if layer.bias is not None:
                left.pop()
                gradients.append(g.sum(0))
            gradients.append(g.T @ x)
            g = g @ left.pop()
        elif isinstance(layer, nn.Tanh):
            g = g * (1 - a**2)
        else:
            g = g * (a > 0)
    return gradients[::-1], g


def current(
    stages: list[nn.Sequential],
    batches: list[Batch],
    loss: Loss,
    optimizer: MakeOptimizer,
    lags: list[int],
    accumulate: int = 1,
) -> list[list[Tensor]]:
    """StaleWeights (arXiv 1912.12675): old activations, newest weights in the vector-Jacobian
    products, m_k = 2(K-1-k).

    Activations come from W_k[max(0, i - m_k) // M]; the backward multiplies by W_k[i // M]. By
    hand, for Linear, Tanh and ReLU on rows; autograd gives only the loss's gradient at the output.
    """
    copies = [_Stage(stage, optimizer) for stage in stages]
    for i, (x, y, share) in enumerate(_micro_batches(batches, accumulate)):
        h, old_activations = x, []
        for k, stage in enumerate(copies):
            old = stage.versions[max(0, i - lags[k]) // accumulate]
            h, activations = _forward_by_hand(stages[k], old, h)
            old_activations.append(activations)
        output = h.detach().requires_grad_()
        (g,) = torch.autograd.grad(_scaled(loss(output, y), share), output)
        for k in reversed(range(len(copies))):
            new = copies[k].versions[i // accumulate]
            own, g = _backward_by_hand(stages[k], new, old_activations[k], g)
            copies[k].add(own)
            if (i + 1) % accumulate == 0:
                copies[k].update()
    return [stage.final() for stage in copies]


def recompute(
    stages: list[nn.Sequential],
    batches: list[Batch],
    loss: Loss,
    optimizer: MakeOptimizer,
    lags: list[int],
    accumulate: int = 1,
) -> list[list[Tensor]]:
    """DSP, Features Replay: only stage inputs are kept, the backward runs the forward again.

    arXiv 1909.02625, any m_k; arXiv 1807.04511, m_k = K-1-k.

    Going up, h_{k+1}(i) = f_k(h_k(i); W_k[max(0, i - m_k) // M]). Going down, f_k (and, above the
    last stage, the loss) is run again from the stored h_k(i) at W_k[i // M].
    """
    copies = [_Stage(stage, optimizer) for stage in stages]
    for i, (x, y, share) in enumerate(_micro_batches(batches, accumulate)):
        h, inputs = x, []
        for stage, lag in zip(copies, lags, strict=True):
            inputs.append(_leaf(h))
            h = stage.forward(stage.versions[max(0, i - lag) // accumulate], inputs[-1])
        error = None
        for k in reversed(range(len(copies))):
            weights = copies[k].leaves(i // accumulate)
            output = copies[k].forward(weights, inputs[k])
            if k == len(copies) - 1:
                output = _scaled(loss(output, y), share)
            own, error = _chain_rule(output, error, weights, inputs[k])
            copies[k].add(own)
            if (i + 1) % accumulate == 0:
                copies[k].update()
    return [stage.final() for stage in copies]


def two_buffered(
    stages: list[nn.Sequential],
    batches: list[Batch],
    loss: Loss,
    optimizer: MakeOptimizer,
    accumulate: int,
) -> list[list[Tensor]]:
    """PipeDream-2BW: group u reads W[max(0, u - 1)] forward and backward, in every stage.

    arXiv 2006.09503. So g(u) is the whole network's gradient one version ago, and
    W[u+1] = Opt(W[u], g(u)).
    """
    copies = [_Stage(stage, optimizer) for stage in stages]
    for u, batch in enumerate(batches):
        for x, y, share in _micro_batches([batch], accumulate):
            h, weights = x, [stage.leaves(max(0, u - 1)) for stage in copies]
            for stage, own in zip(copies, weights, strict=True):
                h = stage.forward(own, h)
            torch.autograd.backward(_scaled(loss(h, y), share))
            for stage, own in zip(copies, weights, strict=True):
                stage.add([w.grad for w in own if w.grad is not None])
        for stage in copies:
            stage.update()
    return [stage.final() for stage in copies]


def local_losses(
    stages: list[nn.Sequential],
    batches: list[Batch],
    loss: Loss,
    optimizer: MakeOptimizer,
    heads: list[nn.Module],
    accumulate: int = 1,
    weigh: Weigh = _rows,
) -> list[list[Tensor]]:
    """DGL (arXiv 1901.08164): each stage trains on its own loss, through its head; only activations
    move, detached.

    Stage k < K-1 minimises loss(head_k(f_k(h_k)), y) over its own and its head's weights, the last
    stage minimises loss(f(h), y). Heads' final weights are not returned.
    """
    tops = [*heads, None]
    copies = [_Stage(s, optimizer, head) for s, head in zip(stages, tops, strict=True)]
    for batch in batches:
        for x, y, share in _micro_batches([batch], accumulate, weigh=weigh):
            h = x
            for stage in copies:
                h = stage.module(h.detach())
                guess = h if stage.head is None else stage.head(h)
                value = _scaled(loss(guess, y), share)
                if stage.live:
                    stage.add(torch.autograd.grad(value, stage.live))
        for stage in copies:
            stage.update()
    return [stage.final() for stage in copies]


# ------------------------------------------------------------------ models in one piece

Apply = Callable[[nn.Module, object], object]
"""How a model is called with the inputs of a batch."""


class _Slices:
    """A copy of a model in one piece, and all the versions of each stage's share of its weights."""

    def __init__(
        self, model: nn.Module, stages: Sequence[Sequence[str]], optimizer: MakeOptimizer
    ) -> None:
        self.model = copy.deepcopy(model)
        self.stages = [[(name, self.model.get_parameter(name)) for name in s] for s in stages]
        self.names = [name for own in self.stages for name, _ in own]
        self._optimizers = [optimizer([p for _, p in own]) if own else None for own in self.stages]
        self.versions: list[list[list[Tensor]]] = [[] for _ in stages]
        self._remember()

    def _remember(self) -> None:
        for versions, own in zip(self.versions, self.stages, strict=True):
            versions.append([p.detach().clone() for _, p in own])

    def leaves(self, numbers: Sequence[int]) -> list[list[Tensor]]:
        """The weights of each stage in that version of it, as leaves of a new graph."""
        return [
            [w.clone().requires_grad_(p.requires_grad) for w, (_, p) in zip(v[n], own, strict=True)]
            for v, n, own in zip(self.versions, numbers, self.stages, strict=True)
        ]

    def forward(self, weights: Sequence[Sequence[Tensor]], apply: Apply, x: object) -> object:
        """The whole model as a function of any weights."""
        named = {
            name: w
            for own, values in zip(self.stages, weights, strict=True)
            for (name, _), w in zip(own, values, strict=True)
        }
        call = _Call(self.model, apply)
        return torch.func.functional_call(call, {f"model.{n}": w for n, w in named.items()}, (x,))

    def update(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """One step of every stage's optimizer with the gradients that these leaves have got."""
        for own, values, optimizer in zip(self.stages, weights, self._optimizers, strict=True):
            for (_, p), w in zip(own, values, strict=True):
                p.grad = w.grad
            if optimizer is not None:
                optimizer.step()
        self._remember()


class _Call(nn.Module):
    def __init__(self, model: nn.Module, apply: Apply) -> None:
        super().__init__()
        self.model, self.apply_model = model, apply

    def forward(self, x: object) -> object:
        return self.apply_model(self.model, x)


def whole(
    rule: str,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    batches: Sequence[tuple[object, object]],
    loss: Callable[..., Tensor],
    optimizer: MakeOptimizer,
    lags: Sequence[int],
    apply: Apply,
) -> nn.Module:
    """``stash`` and ``current`` for any model, which is never cut: the trained copy.

    ``stages`` are names of parameters. The forward of batch i is one call of the whole model at the
    point (.., W_k[max(0, i - m_k)], ..), and its graph is that of the composed stages. Under
    "stash" the gradient is taken there. Under "current" the leaves are overwritten with W_k[i]
    before the backward: what autograd saved of a weight is that weight's memory, so products with
    weights see the newest, while activations stay as they were.
    """
    groups = [[(x, y, 1.0)] for x, y in batches]

    def read(stage: int, i: int) -> int:
        return max(0, i - lags[stage])

    return whole_in_parts(rule, model, stages, groups, loss, optimizer, read, apply)


Group = Sequence[tuple[object, object, float]]
"""The micro-batches of a batch: inputs, targets, factor of the loss."""


def whole_in_parts(
    rule: str,
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    groups: Sequence[Group],
    loss: Callable[..., Tensor],
    optimizer: MakeOptimizer,
    read: Callable[[int, int], int],
    apply: Apply,
    *,
    before: Callable[[nn.Module, int], object] = lambda model, number: None,
    penalty: Callable[..., Tensor] | None = None,
    starts: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: (),
) -> nn.Module:
    """:func:`whole` with an update per group, and ``recompute``.

    ``read(k, i)`` is the version that micro-batch i reads at stage k; ``before(model, number)`` is
    what a script does before a batch. Under ``recompute``, ``starts`` are the modules at which the
    stages after the first begin; the model runs a second time, at the newest weights, and there
    every module of those stages that is called with something from outside its stage is called
    with the values of the first time.
    """
    slices, i = _Slices(model, stages, optimizer), 0
    for number, group in enumerate(groups):
        before(slices.model, number)
        totals = slices.leaves([-1] * len(stages))
        for part, (x, y, share) in enumerate(group):
            weights = slices.leaves([read(k, i) for k in range(len(stages))])
            newest = slices.leaves([number] * len(stages))
            if rule == "recompute":
                inputs = _Inputs(slices.model, starts(slices.model))
                with inputs.noted(), torch.no_grad():  # matmul folds shapes where a graph is kept
                    slices.forward(weights, apply, x)
                weights = newest
                with inputs.given():
                    error = loss(slices.forward(weights, apply, x), y)
            else:
                error = loss(slices.forward(weights, apply, x), y)
            error = _scaled(error, share)
            if penalty is not None and part == 0:
                named = zip(slices.names, itertools.chain(*weights), strict=True)
                error = error + penalty(list(named))
            if rule == "current":
                for leaf, now in zip(
                    itertools.chain(*weights), itertools.chain(*newest), strict=True
                ):
                    leaf.data.copy_(now.data)  # autograd's own check does not see .data
            error.backward()
            for total, leaf in zip(
                itertools.chain(*totals), itertools.chain(*weights), strict=True
            ):
                if leaf.grad is not None:
                    total.grad = leaf.grad if total.grad is None else total.grad + leaf.grad
            i += 1
        slices.update(totals)
    return slices.model


class _Same(torch.autograd.Function):
    """The value of the one, the gradient of the other."""

    @staticmethod
    def forward(ctx: object, ours: Tensor, theirs: Tensor) -> Tensor:
        return theirs.clone()

    @staticmethod
    def backward(ctx: object, *errors: Tensor) -> tuple[Tensor | None, ...]:
        return errors[0], None


class _Inputs:
    """What the modules from the second stage on are called with, and the buffers of before."""

    def __init__(self, model: nn.Module, starts: Sequence[nn.Module]) -> None:
        kind = type(starts[0])
        blocks = [module for module in model.modules() if type(module) is kind]
        self._model, self._starts = model, starts
        self._blocks = blocks[blocks.index(starts[0]) :]
        self._values: list[Tensor] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        state = {n: b.clone() for n, b in self._model.named_buffers()}

        def note(value: Tensor, outside: bool) -> Tensor:
            self._values.append(value.detach().clone())
            return value.detach().requires_grad_(value.is_floating_point()) if outside else value

        with self._hooked(note):
            yield
        for name, buffer in self._model.named_buffers():
            buffer.data.copy_(state[name])

    @contextmanager
    def given(self) -> Iterator[None]:
        values = iter(self._values)

        def give(value: Tensor, outside: bool) -> Tensor:
            theirs = next(values)
            if not outside:
                return value
            if value.requires_grad:
                same: Tensor = _Same.apply(value, theirs)  # type: ignore[no-untyped-call]
                return same
            # Where no graph tells, a stage asks for all gradients, and matmul rounds by that.
            return theirs.requires_grad_(theirs.is_floating_point())

        with self._hooked(give):
            yield

    @contextmanager
    def _hooked(self, visit: Callable[[Tensor, bool], Tensor]) -> Iterator[None]:
        def called(
            module: nn.Module, arguments: tuple[object, ...], settings: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            first = any(module is start for start in self._starts)
            arguments = tuple(
                visit(a, first or number > 0) if isinstance(a, Tensor) else a
                for number, a in enumerate(arguments)
            )
            settings = {
                n: visit(a, True) if isinstance(a, Tensor) else a for n, a in settings.items()
            }
            return arguments, settings

        hooks = [b.register_forward_pre_hook(called, with_kwargs=True) for b in self._blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def level_of_staleness(stages: int, accumulate: int) -> list[list[int]]:
    """ADL's d_{k,j} = ceil((2(K-1-k) - j) / M), not below 0: one row per stage, j = 0..M-1.

    arXiv 2012.03747, its figure for K = 3.
    """
    return [
        [max(0, -((j - 2 * (stages - 1 - k)) // accumulate)) for j in range(accumulate)]
        for k in range(stages)
    ]


def random_network(
    seed: int,
    stages: int,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, int] = (3, 7),
) -> tuple[list[nn.Sequential], int, int]:
    """Stages of 1 to 3 Linear layers with Tanh or ReLU; also the numbers of inputs and classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, ()))

        inputs = width = pick(*widths)
        network = []
        for k in range(stages):
            layers: list[nn.Module] = []
            for _ in range(pick(1, 3)):
                below, width = width, pick(*widths)
                layers.append(nn.Linear(below, width, dtype=dtype))
                layers.append(nn.ReLU() if pick(0, 2) == 0 else nn.Tanh())
            network.append(nn.Sequential(*(layers if k < stages - 1 else layers[:-1])))
    return network, inputs, width


def random_batches(
    seed: int, count: int, rows: int, inputs: int, classes: int, last_rows: int
) -> list[Batch]:
    """`count` batches of float64 rows and class labels, the last one of `last_rows` rows."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for n in range(count):
        size = rows if n < count - 1 else last_rows
        x = torch.randn(size, inputs, dtype=torch.float64, generator=generator)
        batches.append((x, torch.randint(classes, (size,), generator=generator)))
    return batches
