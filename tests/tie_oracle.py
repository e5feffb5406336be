"""Weights that several stages use, naively: what every rule says about them, by hand.

Nothing here is the library's. Every weight belongs to the first stage that uses it, `versions[w]`
holds ALL its values, one per update of its owner, and every micro-batch i does what is written:

    going up, stage k uses w as w's owner o read it: W_w[read(o, i)];
    going down, a stage uses its own weights as its rule says and those of others as they came;
    the gradients of the uses are added last use first, and the sum is applied at the owner.

Layers are Linear, Tanh and ReLU on rows; only the loss is differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def train(
    stages: Sequence[nn.Module],
    batches: Sequence[Batch],
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    *,
    rule: str,
    read: Callable[[int, int], int],
    parts: int = 1,
    beta: float = 1.0,
) -> dict[int, Tensor]:
    """The final weights by the id of the parameter they began as.

    ``read(k, i)`` is the version that micro-batch i reads at stage k.
    """
    owner: dict[int, int] = {}
    start: dict[int, Tensor] = {}
    for k, stage in enumerate(stages):
        for layer in stage.children():
            for p in layer.parameters():
                owner.setdefault(id(p), k)
                start[id(p)] = p.detach().clone()
    live = {w: value.clone() for w, value in start.items()}
    versions = {w: [value] for w, value in start.items()}
    optimizers = []
    for k in range(len(stages)):
        own = [live[w] for w in owner if owner[w] == k]
        optimizers.append(optimizer(own) if own else None)
    pieces = [
        (xs, ys, len(xs) / len(x))
        for x, y in batches
        for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
    ]
    for i, (x, y, share) in enumerate(pieces):
        came = {w: versions[w][read(o, i)] for w, o in owner.items()}
        newest = {w: versions[w][i // parts] for w in owner}
        h, kept = x, []
        for stage in stages:
            kept.append(_activations(stage, came, h))
            h = kept[-1][-1]
        arriving: dict[int, Tensor] = {}
        g = torch.empty(0)
        for k in reversed(range(len(stages))):
            used = came
            if rule != "stash":
                used = {w: newest[w] if owner[w] == k else came[w] for w in owner}
            if rule == "recompute":
                kept[k] = _activations(stages[k], used, kept[k][0])
            if k == len(stages) - 1:
                output = kept[k][-1].detach().requires_grad_()
                value = loss(output, y)
                (g,) = torch.autograd.grad(value if share == 1.0 else value * share, output)
            else:
                g = g * beta
                arriving = {w: gradient * beta for w, gradient in arriving.items()}
            g = _down(stages[k], used, kept[k], g, arriving)
            for w in [w for w in arriving if owner[w] == k]:
                total, before = arriving.pop(w), live[w].grad
                live[w].grad = total if before is None else before + total
            if (i + 1) % parts == 0 and (steps := optimizers[k]) is not None:
                steps.step()
                steps.zero_grad()
                for w in (w for w in owner if owner[w] == k):
                    versions[w].append(live[w].detach().clone())
    return {w: values[-1] for w, values in versions.items()}


def _activations(stage: nn.Module, weights: dict[int, Tensor], x: Tensor) -> list[Tensor]:
    """The input, then each layer's output."""
    found = [x]
    for layer in stage.children():
        if isinstance(layer, nn.Linear):
            x = x @ weights[id(layer.weight)].T + weights[id(layer.bias)]
        else:
            x = x.tanh() if isinstance(layer, nn.Tanh) else x.clamp(min=0)
        found.append(x)
    return found


def _down(
    stage: nn.Module,
    weights: dict[int, Tensor],
    activations: Sequence[Tensor],
    g: Tensor,
    sums: dict[int, Tensor],
) -> Tensor:
    """The gradient of the stage's input; those of its weights are added to ``sums``."""
    for n, layer in reversed(list(enumerate(stage.children()))):
        x, a = activations[n], activations[n + 1]
        if isinstance(layer, nn.Linear):
            for w, own in ((id(layer.weight), g.T @ x), (id(layer.bias), g.sum(0))):
                sums[w] = sums[w] + own if w in sums else own
            g = g @ weights[id(layer.weight)]
        else:
            g = g * (1 - a**2) if isinstance(layer, nn.Tanh) else g * (a > 0)
    return g
