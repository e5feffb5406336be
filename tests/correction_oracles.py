"""What the corrections' papers say, naively: formulas on lists of all versions.

The docstrings have the formulas and the papers. D is a gradient's lag in updates, m the momentum,
u the optimizer's step.

As in `oracles.py` nothing is shared with the library. A stage keeps every version of its weights
and of its optimizer's momentum, and everything a rule could ask for is looked up by its index in
time. With m_k the lag of stage k and M micro-batches per update, the j-th micro-batch since the
last drain, which began at version V,

    goes forward at version  V + max(0, j - m_k) // M   and is applied at  V + j // M,

and the difference is its lag D: smaller while the pipe fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from oracles import Batch, Loss, _backward_by_hand, _forward_by_hand, _leaf, _micro_batches, _scaled

Weights = list[Tensor]


class History:
    """One stage: all versions of its weights, and of what its optimizer remembers."""

    def __init__(self, module: nn.Sequential, lag: int, stages: int) -> None:
        self.module = module
        self.names = [name for name, _ in module.named_parameters()]
        self.weights: list[Weights] = [[p.detach().clone() for p in module.parameters()]]
        zero = [torch.zeros_like(w) for w in self.weights[0]]
        self.first: list[Weights] = [zero]  # SGD's velocity or Adam's first moment
        self.second: list[Weights] = [zero]
        self.lag = lag  # the largest, in updates
        self.stages = stages
        self.notes: dict[str, list[Weights]] = {}  # what a rule wants to remember
        self.numbers: dict[str, float] = {}

    @property
    def now(self) -> int:
        return len(self.weights) - 1

    def forward(self, weights: Weights, x: Tensor) -> Tensor:
        named = dict(zip(self.names, weights, strict=True))
        output: Tensor = torch.func.functional_call(self.module, named, (x,))
        return output


Step = Callable[[History, Weights, int], Weights]


@dataclass
class Rules:
    """What a correction changes; each entry is a formula. `step` returns the new weights."""

    step: Step
    forward: Callable[[History, int, int], Weights] = lambda h, v, D: h.weights[v]
    backward: Callable[[History, int], Weights] = lambda h, behind: h.weights[-1]
    gradient: Callable[[History, Weights, Weights, int], Weights] = lambda h, g, read, D: g
    shrink: float = 1.0
    rule: str = "stash"


def train(
    stages: list[nn.Sequential],
    segments: list[list[Batch]],
    loss: Loss,
    lags: list[int],
    rules: Rules,
    accumulate: int = 1,
) -> list[Weights]:
    """Every segment is trained on and drained; returns the final weights per stage."""
    K = len(stages)
    histories = [
        History(stage, -(-lag // accumulate), K) for stage, lag in zip(stages, lags, strict=True)
    ]
    for batches in segments:
        start = [h.now for h in histories]
        gathered: list[list[Weights]] = [[] for _ in histories]
        read: list[list[tuple[int, Weights]]] = [[] for _ in histories]
        for j, (x, y, share) in enumerate(_micro_batches(batches, accumulate)):
            points, inputs = [], []
            h = x
            for k, stage in enumerate(histories):
                version = start[k] + max(0, j - lags[k]) // accumulate
                D = start[k] + j // accumulate - version
                weights = rules.forward(stage, version, D) if stage.lag else stage.weights[version]
                points.append(weights)
                read[k].append((version, weights))
                inputs.append(h)
                h = stage.forward(weights, h).detach()
            error: Tensor | None = None
            for k in reversed(range(K)):
                stage = histories[k]
                if error is not None and stage.lag:
                    error = rules.shrink * error
                own, error = _gradient(
                    stage, points[k], inputs[k], error, rules, stage.now - read[k][-1][0],
                    partial(_shared_loss, loss, y, share),
                )  # fmt: skip
                gathered[k].append(own)
            if (j + 1) % accumulate == 0:
                for k, stage in enumerate(histories):
                    _update(stage, gathered[k], read[k], rules)
                    gathered[k], read[k] = [], []
    return [h.weights[-1] for h in histories]


def _shared_loss(loss: Loss, y: Tensor, share: float, output: Tensor) -> Tensor:
    return _scaled(loss(output, y), share)


def _gradient(
    stage: History, point: Weights, x: Tensor, error: Tensor | None, rules: Rules, behind: int,
    loss: Callable[[Tensor], Tensor],
) -> tuple[Weights, Tensor]:  # fmt: skip
    """The gradients of one micro-batch, of the stage's weights and of its input."""
    backward = rules.backward(stage, behind) if stage.lag else stage.weights[-1]
    if rules.rule == "current":
        output, activations = _forward_by_hand(stage.module, point, x)
        if error is None:
            top = output.detach().requires_grad_()
            (error,) = torch.autograd.grad(loss(top), top)
        return _backward_by_hand(stage.module, backward, activations, error)
    leaves = [w.clone().requires_grad_() for w in (point if rules.rule == "stash" else backward)]
    given = _leaf(x)
    output = stage.forward(leaves, given)
    *own, down = torch.autograd.grad(
        loss(output) if error is None else output, [*leaves, given], error
    )
    return list(own), down


def _update(
    stage: History, gathered: list[Weights], read: list[tuple[int, Weights]], rules: Rules
) -> None:
    g = [sum(parts[1:], parts[0]) for parts in map(list, zip(*gathered, strict=True))]
    D = max(stage.now - version for version, _ in read)
    if stage.lag:
        mean = [sum(ws[1:], ws[0]) / len(ws) for ws in zip(*(w for _, w in read), strict=True)]
        g = rules.gradient(stage, g, mean, D)
    stage.weights.append(rules.step(stage, g, D if stage.lag else 0))


# ------------------------------------------------------------------ optimizers by hand


@dataclass(frozen=True)
class SGD:
    lr: float = 0.05
    m: float = 0.9
    decay: float = 1e-3

    def decayed(self, h: History, g: Weights) -> Weights:
        return [a + self.decay * w for a, w in zip(g, h.weights[-1], strict=True)]

    def moment(self, h: History, g: Weights, m: float | None = None) -> Weights:
        m = self.m if m is None else m
        v = [m * a + b for a, b in zip(h.first[-1], self.decayed(h, g), strict=True)]
        h.first.append(v)
        return v

    def moved(self, h: History, u: Weights, lr: float | None = None) -> Weights:
        lr = self.lr if lr is None else lr
        return [w - lr * a for w, a in zip(h.weights[-1], u, strict=True)]

    def direction(self, h: History, v: int) -> Weights:
        return h.first[v]


@dataclass(frozen=True)
class Adam:
    lr: float = 0.01
    m: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    decoupled: bool = False

    def decayed(self, h: History, g: Weights) -> Weights:
        decay = 0.0 if self.decoupled else self.decay
        return [a + decay * w for a, w in zip(g, h.weights[-1], strict=True)]

    def moment(self, h: History, g: Weights, m: float | None = None) -> Weights:
        m = self.m if m is None else m
        g = self.decayed(h, g)
        h.first.append([m * a + (1 - m) * b for a, b in zip(h.first[-1], g, strict=True)])
        b2 = self.b2
        h.second.append([b2 * a + (1 - b2) * b * b for a, b in zip(h.second[-1], g, strict=True)])
        return h.first[-1]

    def normalised(self, h: History, v: int, moment: Weights, m: float | None = None) -> Weights:
        m = self.m if m is None else m
        return [
            a / (1 - m**v) / ((s / (1 - self.b2**v)).sqrt() + self.eps)
            for a, s in zip(moment, h.second[v], strict=True)
        ]

    def moved(
        self, h: History, u: Weights, lr: float | None = None, m: float | None = None
    ) -> Weights:
        lr = self.lr if lr is None else lr
        shrunk = [w * (1 - lr * self.decay * self.decoupled) for w in h.weights[-1]]
        return [
            w - lr * a
            for w, a in zip(shrunk, self.normalised(h, len(h.weights), u, m), strict=True)
        ]

    def direction(self, h: History, v: int) -> Weights:
        return h.first[0] if v == 0 else self.normalised(h, v, h.first[v])


Optimizer = SGD | Adam


def plain(o: Optimizer) -> Step:
    return lambda h, g, D: o.moved(h, o.moment(h, g))


def by_torch(factory: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Step:
    """Any optimizer of torch's; it must be fed the same tensors every time."""
    live: dict[int, tuple[list[Tensor], torch.optim.Optimizer]] = {}

    def step(h: History, g: Weights, D: int) -> Weights:
        if id(h) not in live:
            own = [w.clone().requires_grad_() for w in h.weights[-1]]
            live[id(h)] = (own, factory(own))
        own, optimizer = live[id(h)]
        for w, a in zip(own, g, strict=True):
            w.grad = a
        optimizer.step()
        return [w.detach().clone() for w in own]

    return step


# ------------------------------------------------------------------ corrections


def geometric(m: float, D: int) -> float:
    return m * (1 - m**D) / (1 - m)


def predicted(
    o: Optimizer, horizon: Callable[[int], float]
) -> Callable[[History, int, int], Weights]:
    """w + T d, d = -lr times the optimizer's direction.

    SpecTrain (arXiv 1809.02839) and LWP (arXiv 2003.11666) take T = D.
    """
    return lambda h, v, D: [
        w - horizon(D) * o.lr * u for w, u in zip(h.weights[v], o.direction(h, v), strict=True)
    ]


def predicted_by_difference(
    horizon: Callable[[int], float],
) -> Callable[[History, int, int], Weights]:
    """w[v] + T (w[v] - w[v-1]): LWP's other form (arXiv 2003.11666)."""
    return lambda h, v, D: [
        w + horizon(D) * (w - b)
        for w, b in zip(h.weights[v], h.weights[max(0, v - 1)], strict=True)
    ]


def predicted_by_fit(o: Optimizer) -> Callable[[History, int, int], Weights]:
    """T = <w[t+D] - w[t], d[t]> / <d[t], d[t]>, running means, from version 1 on.

    LWP's horizon by least squares: derived, in no paper.
    """

    def forward(h: History, v: int, D: int) -> Weights:
        along = square = 0.0
        for t in range(1, v + 1):
            now = before = 0.0
            if t - h.lag >= 1:
                for w, b, u in zip(
                    h.weights[t], h.weights[t - h.lag], o.direction(h, t - h.lag), strict=True
                ):
                    now += float(((w - b) * -o.lr * u).sum())
                    before += float((o.lr * u * o.lr * u).sum())
            along, square = 0.98 * along + 0.02 * now, 0.98 * square + 0.02 * before
        T = min(max(along / square if square else h.lag / 2, 0.0), float(D))
        return [w - T * o.lr * u for w, u in zip(h.weights[v], o.direction(h, v), strict=True)]

    return forward


def spiked(o: Optimizer, at_most: int | None = None) -> Step:
    """a v + b g, a = m^D, b = (1 - m^D) / (1 - m); Adam: its own moment and (1 - m) g.

    Spike compensation, Kosson et al. (arXiv 2003.11666).
    """

    def step(h: History, g: Weights, D: int) -> Weights:
        D = D if at_most is None else min(D, at_most)
        a, b = o.m**D, (1 - o.m**D) / (1 - o.m)
        scale = 1.0 if isinstance(o, SGD) else 1 - o.m
        newest = o.decayed(h, g)
        v = o.moment(h, g)
        return o.moved(h, [a * p + b * scale * q for p, q in zip(v, newest, strict=True)])

    return step


def extrapolated(o: Optimizer, gain: float = 1.0) -> Step:
    """u + gain D (u - u_previous), u being whole steps of the optimizer: derived."""

    def step(h: History, g: Weights, D: int) -> Weights:
        w = h.weights[-1]
        u = [a - b for a, b in zip(o.moved(h, o.moment(h, g)), w, strict=True)]
        before = h.notes.setdefault("steps", [u])[-1]
        h.notes["steps"].append(u)
        return [c + a + gain * D * (a - b) for c, a, b in zip(w, u, before, strict=True)]

    return step


def compensated(
    strength: float, adaptive: bool = False
) -> Callable[[History, Weights, Weights, int], Weights]:
    """g + l g g (w_now - w_read); l / sqrt(mean g^2) when adaptive: DC-ASGD (arXiv 1609.08326)."""

    def gradient(h: History, g: Weights, read: Weights, D: int) -> Weights:
        before = h.notes.setdefault("squares", [[torch.zeros_like(a) for a in g]])[-1]
        squares = [0.95 * s + 0.05 * a * a for s, a in zip(before, g, strict=True)]
        h.notes["squares"].append(squares)
        made = []
        for a, now, then, s in zip(g, h.weights[-1], read, squares, strict=True):
            strong = strength / (s + 1e-7).sqrt() if adaptive else strength
            made.append(a + strong * a * a * (now - then))
        return made

    return gradient


def gap_aware(o: Optimizer, forget: float) -> Callable[[History, Weights, Weights, int], Weights]:
    """(g + decay w) / (1 + |w_now - w_read| / C) - decay w, C = lr sqrt(mean g^2).

    Gap-Aware, Barkai et al. (arXiv 1909.10802).
    """

    def gradient(h: History, g: Weights, read: Weights, D: int) -> Weights:
        steps = h.notes.setdefault("squares", [[torch.zeros_like(a) for a in g]])
        steps.append([forget * s + (1 - forget) * a * a for s, a in zip(steps[-1], g, strict=True)])
        seen = 1 - forget ** (len(steps) - 1)
        if D == 0:
            return g
        decay = 0.0 if isinstance(o, Adam) and o.decoupled else o.decay
        made = []
        for a, now, then, s in zip(g, h.weights[-1], read, steps[-1], strict=True):
            penalty = 1 + (now - then).abs() / (o.lr * (s / seen).sqrt() + 1e-12)
            made.append((a + decay * now) / penalty - decay * now)
        return made

    return gradient


def clipped(
    norm: float | None = None, times: float | None = None
) -> Callable[[History, Weights, Weights, int], Weights]:
    """Down to a norm, or to so many times the mean of the (clipped) norms before."""

    def gradient(h: History, g: Weights, read: Weights, D: int) -> Weights:
        length = float(sum((a * a).sum() for a in g)) ** 0.5
        bound = norm
        if times is not None:
            mean, weight = h.numbers.get("mean", 0.0), h.numbers.get("weight", 0.0)
            bound = times * mean / weight if weight else float("inf")
            h.numbers["mean"] = 0.99 * mean + 0.01 * min(length, bound)
            h.numbers["weight"] = 0.99 * weight + 0.01
        assert bound is not None
        return [a * min(1.0, bound / (length + 1e-6)) for a in g]

    return gradient


def rated(o: Optimizer, scale: Callable[[int, int], float]) -> Step:
    """The learning rate times `scale(D, updates so far)`; PipeMare's scale is D^-(1 - t/anneal)
    (arXiv 1910.05124)."""
    return lambda h, g, D: o.moved(h, o.moment(h, g), lr=o.lr * scale(D, h.now))


def momentum_by_lag(o: Optimizer, towards: float) -> Step:
    """m + D (towards - m) / K, and not beyond; D that of a full pipe (arXiv 2505.01099)."""

    def step(h: History, g: Weights, D: int) -> Weights:
        m = o.m + min(1.0, h.lag / h.stages) * (towards - o.m)
        u = o.moment(h, g, m)
        return o.moved(h, u) if isinstance(o, SGD) else o.moved(h, u, m=m)

    return step


def rewound(c: float) -> Callable[[History, int], Weights]:
    """w - n delta, delta a running mean of updates with g = c^(1/D).

    PipeMare (arXiv 1910.05124).
    """

    def backward(h: History, behind: int) -> Weights:
        keep = c ** (1 / h.lag)
        delta: Sequence[Tensor] = [torch.zeros_like(w) for w in h.weights[0]]
        for t in range(1, len(h.weights)):
            delta = [
                keep * d + (1 - keep) * (a - b)
                for d, a, b in zip(delta, h.weights[t], h.weights[t - 1], strict=True)
            ]
        return [w - behind * d for w, d in zip(h.weights[-1], delta, strict=True)]

    return backward
