"""Many GPTs as one: every seed's weights are a slice of one tensor, so one run trains them all.

A small transformer leaves a GPU idle, and one that takes its batch in 32 parts even more so; the
same layer of many fills it. Nothing passes between slices and the loss is a sum over the networks,
so that each learns what it would learn alone (tests/test_language.py), but for dropout, whose draws
depend on how many there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.jobs import layers_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, _muon

from offbeat.zoo.gpt import Block, Embedding


def ensemble(make: Callable[[], nn.Sequential], seeds: Sequence[int]) -> nn.Sequential:
    """The GPTs that ``make`` returns under each seed: tokens (rows, networks, context) to logits.

    Between the layers, networks come first: the layout of batched matrix products.
    """
    layers = [_together(list(same)) for same in layers_of(make, seeds)]
    return nn.Sequential(*layers[:-1], Head(layers[-1]))


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean per network, added up."""
    return losses_of(logits, tokens).sum()


def losses_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Per network; ``logits`` are (rows, networks, context, vocabulary)."""
    # In full precision wherever it is called: bfloat16 has three digits, and gaps are in the third.
    each = F.cross_entropy(logits.float().flatten(0, 2), tokens.flatten(), reduction="none")
    return each.view(tokens.shape).mean((0, 2))


def _together(layers: Sequence[nn.Module]) -> nn.Module:
    first = layers[0]
    if isinstance(first, nn.Linear):
        return Linears(layers)
    if isinstance(first, nn.LayerNorm):
        return Norms(layers)
    if isinstance(first, Embedding):
        return Embeddings(layers)
    if isinstance(first, Block):
        return Blocks(layers)
    raise TypeError(f"an ensemble of {type(first).__name__} is not known")


def _stacked(layers: Sequence[nn.Module], name: str) -> nn.Parameter:
    return nn.Parameter(torch.stack([layer.get_parameter(name).detach() for layer in layers]))


class Linears(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = _stacked(layers, "weight")
        has_bias = layers[0].bias is not None
        self.bias = _stacked(layers, "bias") if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, -2)
        if self.bias is None:
            y = torch.bmm(rows, self.weight.mT)
        else:
            y = torch.baddbmm(self.bias[:, None], rows, self.weight.mT)
        return y.view(*x.shape[:-1], -1)


class Norms(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        first = layers[0]
        assert isinstance(first, nn.LayerNorm)
        self.eps = first.eps
        self.weight = _stacked(layers, "weight")
        self.bias = _stacked(layers, "bias")

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias[:, None, None], normed, self.weight[:, None, None])


class Embeddings(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        first = layers[0]
        assert isinstance(first, Embedding)
        self.token = _stacked(layers, "token.weight")
        self.place = _stacked(layers, "place.weight")
        self.dropout = first.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        networks, vocabulary, _ = self.token.shape
        first = vocabulary * torch.arange(networks, device=tokens.device)
        own = tokens.transpose(0, 1) + first[:, None, None]
        x = F.embedding(own, self.token.flatten(0, 1)) + self.place[:, None, : tokens.size(-1)]
        y: Tensor = self.dropout(x)
        return y


class Blocks(Block):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        first = layers[0]
        assert isinstance(first, Block)
        super().__init__(first.norm1.weight.numel(), first.heads, first.dropout.p)
        for name, child in list(self.named_children()):
            if child is not self.dropout:
                setattr(self, name, _together([layer.get_submodule(name) for layer in layers]))

    def _attend(self, parts: Tensor) -> Tensor:
        mixed = super()._attend(parts.flatten(0, 1))
        return mixed.view(*parts.shape[:-1], -1)


class Head(nn.Module):
    """Rows first again, as in the targets."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).transpose(0, 1)
        return y


class StackedMuon(Optimizer):
    """PyTorch's Muon for matrices in stacks, each made orthogonal by itself.

    Its rate may be a tensor on the device.
    """

    def __init__(
        self, stacks: Sequence[nn.Parameter], lr: float | Tensor, momentum: float, decay: float
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": decay,
            "decoupled_weight_decay": True,
            "capturable": True,  # it counts nothing
        }
        super().__init__(stacks, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "a stage gives gradients, not a closure"
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for stack in group["params"]:
                if "momentum_buffer" not in self.state[stack]:
                    self.state[stack]["momentum_buffer"] = torch.zeros_like(stack)
                velocity = self.state[stack]["momentum_buffer"]
                velocity.lerp_(stack.grad, 1 - momentum)
                way = _each_orthogonal(stack.grad.lerp(velocity, momentum))
                stack.mul_(1 - rate * group["weight_decay"])
                length = _muon._adjust_lr(rate, "match_rms_adamw", stack.shape[1:])
                stack.sub_(way.to(stack.dtype) * length)


def _each_orthogonal(stack: Tensor) -> Tensor:
    """PyTorch's Newton-Schulz iteration, for all matrices of a stack at once."""
    a, b, c = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
    tall = stack.size(1) > stack.size(2)
    x = stack.bfloat16().mT if tall else stack.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_muon.EPS)
    for _ in range(_muon.DEFAULT_NS_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
