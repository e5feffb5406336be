"""BatchNorm of many small networks at once, with the sum and the ReLU behind it, as two operators.

PyTorch takes a kernel or more for each step of a BatchNorm, a sum and a ReLU; with micro-batches of
a few images their number is what takes the time. These take two forward and two backward. On a GPU
and in bfloat16 they are Triton kernels, elsewhere PyTorch's own operations.
"""

from typing import Any

import torch
from benchmarks.accuracy.kernels import channels_last, draws, error_of, in_triton, tl, triton
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-5
VALUES_AT_ONCE = 4096
MOST_PARTS = 64
"""Into which the pixels are cut; everyone who needs a sum adds up the parts."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _added_up(  # type: ignore[no-untyped-def]
        partial, channel, channels, parts, PARTS: tl.constexpr
    ):
        """Both sums over all parts, of some channels."""
        part = tl.arange(0, PARTS)
        place = partial + (2 * part * channels)[:, None] + channel[None, :]
        there = (part < parts)[:, None]
        first = tl.sum(tl.load(place, mask=there, other=0.0), 0)
        second = tl.sum(tl.load(place + channels, mask=there, other=0.0), 0)
        return first, second

    @triton.jit  # type: ignore[untyped-decorator]
    def _moments(  # type: ignore[no-untyped-def]
        x, partial, pixels, blocks, channels, C: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Sums of values and of squares, over a part of the pixels."""
        part = tl.program_id(0)
        channel = tl.program_id(1) * C + tl.arange(0, C)
        values = tl.zeros((C,), tl.float32)
        squares = tl.zeros((C,), tl.float32)
        for block in range(blocks):
            pixel = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            place = pixel[:, None] * channels + channel[None, :]
            seen = tl.load(x + place, mask=(pixel < pixels)[:, None], other=0.0).to(tl.float32)
            values += tl.sum(seen, 0)
            squares += tl.sum(seen * seen, 0)
        tl.store(partial + 2 * part * channels + channel, values)
        tl.store(partial + (2 * part + 1) * channels + channel, squares)

    @triton.jit  # type: ignore[untyped-decorator]
    def _normalize(  # type: ignore[no-untyped-def]
        x, weight, bias, other, partial, y, statistics, pixels, blocks, channels, parts, epsilon,
        ADD: tl.constexpr, RELU: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
        PARTS: tl.constexpr,
    ):  # fmt: skip
        """``statistics``: mean, variance (unbiased), 1 / standard deviation."""
        part = tl.program_id(0)
        channel = tl.program_id(1) * C + tl.arange(0, C)
        values, squares = _added_up(partial, channel, channels, parts, PARTS)
        mean = values / pixels
        variance = tl.maximum(squares / pixels - mean * mean, 0.0)
        inverse = 1.0 / tl.sqrt(variance + epsilon)
        if part == 0:
            tl.store(statistics + channel, mean)
            tl.store(statistics + channels + channel, variance * (pixels / (pixels - 1)))
            tl.store(statistics + 2 * channels + channel, inverse)
        scale = inverse * tl.load(weight + channel)
        shift = tl.load(bias + channel) - mean * scale
        for block in range(blocks):
            pixel = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            place = pixel[:, None] * channels + channel[None, :]
            there = (pixel < pixels)[:, None]
            made = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
            made = made * scale[None, :] + shift[None, :]
            if ADD:
                made += tl.load(other + place, mask=there, other=0.0).to(tl.float32)
            if RELU:
                made = tl.maximum(made, 0.0)
            tl.store(y + place, made.to(y.dtype.element_ty), mask=there)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gradient_moments(  # type: ignore[no-untyped-def]
        x, y, dy, statistics, partial, pixels, blocks, channels,
        RELU: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Sums of the gradient, and of it times what was normalized, over a part of the pixels."""
        part = tl.program_id(0)
        channel = tl.program_id(1) * C + tl.arange(0, C)
        mean = tl.load(statistics + channel)
        inverse = tl.load(statistics + 2 * channels + channel)
        plain = tl.zeros((C,), tl.float32)
        weighted = tl.zeros((C,), tl.float32)
        for block in range(blocks):
            pixel = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            place = pixel[:, None] * channels + channel[None, :]
            there = (pixel < pixels)[:, None]
            back = tl.load(dy + place, mask=there, other=0.0).to(tl.float32)
            if RELU:
                shown = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
                back = tl.where(shown > 0, back, 0.0)
            seen = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
            plain += tl.sum(back, 0)
            weighted += tl.sum(back * (seen - mean[None, :]) * inverse[None, :], 0)
        tl.store(partial + 2 * part * channels + channel, plain)
        tl.store(partial + (2 * part + 1) * channels + channel, weighted)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gradients(  # type: ignore[no-untyped-def]
        x, y, dy, weight, statistics, partial, dx, d_other, d_affine, pixels, blocks, channels,
        parts, ADD: tl.constexpr, RELU: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
        PARTS: tl.constexpr,
    ):  # fmt: skip
        """``d_affine``: of the weight, of the bias."""
        part = tl.program_id(0)
        channel = tl.program_id(1) * C + tl.arange(0, C)
        plain, weighted = _added_up(partial, channel, channels, parts, PARTS)
        if part == 0:
            tl.store(d_affine + channel, weighted)
            tl.store(d_affine + channels + channel, plain)
        mean = tl.load(statistics + channel)
        inverse = tl.load(statistics + 2 * channels + channel)
        scale = inverse * tl.load(weight + channel)
        plain = plain / pixels
        weighted = weighted / pixels
        for block in range(blocks):
            pixel = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            place = pixel[:, None] * channels + channel[None, :]
            there = (pixel < pixels)[:, None]
            back = tl.load(dy + place, mask=there, other=0.0).to(tl.float32)
            if RELU:
                shown = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
                back = tl.where(shown > 0, back, 0.0)
            if ADD:
                tl.store(d_other + place, back.to(d_other.dtype.element_ty), mask=there)
            seen = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
            normal = (seen - mean[None, :]) * inverse[None, :]
            made = (back - plain[None, :] - normal * weighted[None, :]) * scale[None, :]
            tl.store(dx + place, made.to(dx.dtype.element_ty), mask=there)


def _pieces(x: Tensor, networks: int) -> tuple[Tensor, int, dict[str, int]]:
    """Memory for two sums of every part, the parts, and what all kernels are told."""
    pixels, channels = x.numel() // x.shape[1], x.shape[1] // networks
    block = VALUES_AT_ONCE // channels
    parts = max(1, min(MOST_PARTS, pixels // (2 * block)))
    blocks = triton.cdiv(triton.cdiv(pixels, parts), block)
    parts = triton.cdiv(pixels, blocks * block)
    partial = torch.empty((parts, 2, x.shape[1]), dtype=torch.float32, device=x.device)
    told = {"pixels": pixels, "blocks": blocks, "channels": x.shape[1], "C": channels}
    return partial, parts, told | {"BLOCK": block}


@torch.library.custom_op("offbeat_benchmarks::norm", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, networks: int, relu: bool
) -> tuple[Tensor, Tensor]:
    """The images, and their statistics: mean, variance, 1 / standard deviation."""
    all_channels = x.shape[1]
    if not in_triton(x):
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        inverse = (variance + EPSILON).rsqrt()
        scale = inverse * weight
        y = x * scale[:, None, None] + (bias - mean * scale)[:, None, None]
        if other is not None:
            y = y + other
        pixels = x.numel() // all_channels
        statistics = torch.stack([mean, variance * (pixels / (pixels - 1)), inverse])
        return channels_last((y.relu() if relu else y).to(x.dtype)), statistics.to(weight.dtype)
    x = channels_last(x)
    other = None if other is None else channels_last(other)
    partial, parts, told = _pieces(x, networks)
    statistics = torch.empty((3, all_channels), dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    _moments[(parts, networks)](x, partial, **told)
    _normalize[(parts, networks)](
        x, weight, bias, x if other is None else other, partial, y, statistics, parts=parts,
        epsilon=EPSILON, ADD=other is not None, RELU=relu, PARTS=triton.next_power_of_2(parts),
        **told,
    )  # fmt: skip
    return y, statistics


@torch.library.custom_op("offbeat_benchmarks::norm_backward", mutates_args=())
def _backward(
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    weight: Tensor,
    statistics: Tensor,
    networks: int,
    relu: bool,
    add: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the images, of what was added to them, and of weight and bias."""
    all_channels = x.shape[1]
    if not in_triton(x):
        mean, _, inverse = (value[:, None, None] for value in statistics.to(x.dtype))
        back = dy * (y > 0) if relu else dy.clone()
        normal = (x - mean) * inverse
        affine = torch.stack([(back * normal).sum((0, 2, 3)), back.sum((0, 2, 3))])
        weighted, plain = (affine / (x.numel() // all_channels))[:, :, None, None]
        dx = (back - plain - normal * weighted) * (inverse * weight[:, None, None])
        d_other = channels_last(back) if add else x.new_empty(0)
        return channels_last(dx.to(x.dtype)), d_other, affine.to(weight.dtype)
    x, y, dy = channels_last(x), channels_last(y), channels_last(dy)
    partial, parts, told = _pieces(x, networks)
    affine = torch.empty((2, all_channels), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x)
    d_other = torch.empty_like(x) if add else x.new_empty(0)
    _gradient_moments[(parts, networks)](x, y, dy, statistics, partial, RELU=relu, **told)
    _gradients[(parts, networks)](
        x, y, dy, weight, statistics, partial, dx, d_other, affine, parts=parts, ADD=add, RELU=relu,
        PARTS=triton.next_power_of_2(parts), **told,
    )  # fmt: skip
    return dx, d_other, affine


@_forward.register_fake
def _shapes_of_outputs(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, networks: int, relu: bool
) -> tuple[Tensor, Tensor]:
    del bias, other, networks, relu
    return channels_last(torch.empty_like(x)), weight.new_empty((3, x.shape[1]))


@_backward.register_fake
def _shapes_of_gradients(
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    weight: Tensor,
    statistics: Tensor,
    networks: int,
    relu: bool,
    add: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    del y, dy, statistics, networks, relu
    image = channels_last(torch.empty_like(x))
    other = torch.empty_like(image) if add else x.new_empty(0)
    return image, other, weight.new_empty((2, x.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, other, ctx.networks, ctx.relu = inputs
    y, statistics = output
    ctx.add = other is not None
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # a kernel for nothing
    ctx.save_for_backward(x, y, weight, statistics)


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, y, weight, statistics = ctx.saved_tensors
    dx, d_other, affine = _backward(x, y, dy, weight, statistics, ctx.networks, ctx.relu, ctx.add)
    return dx, affine[0], affine[1], (d_other if ctx.add else None), None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, networks: int, other: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor]:
    """BatchNorm of a batch, ``other`` added, negative values cut; and the batch's statistics.

    These are the mean, the unbiased variance and the inverse of the standard deviation.
    """
    made: tuple[Tensor, Tensor] = _forward(x, weight, bias, other, networks, relu)
    return made


def largest_error(device: torch.device) -> float:
    """Relative, against PyTorch's own in full precision, over all shapes in use."""
    drawn, networks, worst = draws(device), 3, 0.0
    for channels, side, rows in ((16, 32, 20), (32, 16, 5), (64, 8, 3)):
        for add in (False, True):
            shape = (rows, networks * channels, side, side)
            x, other = (channels_last(drawn(*shape) + 0.5).requires_grad_() for _ in range(2))
            weight, bias = (drawn(shape[1]).float().requires_grad_() for _ in range(2))
            inputs = [x, weight, bias, *([other] if add else [])]
            y, statistics = norm(
                x, weight, bias, networks=networks, other=other if add else None, relu=add
            )
            dy = channels_last(drawn(*shape))
            found = [y, statistics[0], statistics[1], *torch.autograd.grad(y, inputs, dy)]
            exact = [t.detach().double().requires_grad_() for t in inputs]
            true = F.batch_norm(exact[0], None, None, exact[1], exact[2], True, 0.1, EPSILON)
            if add:
                # The same values are cut, those that bfloat16 rounds to nothing included.
                true = (true + exact[3]) * (y.detach() > 0)
            variance, mean = torch.var_mean(exact[0], (0, 2, 3))
            wanted = [true, mean, variance, *torch.autograd.grad(true, exact, dy.double())]
            worst = max(worst, error_of(found, wanted))
    return worst
