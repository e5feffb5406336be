"""3x3 convolutions of many small networks at once, as two operators.

cuDNN's grouped convolutions are made for few wide groups; here are many narrow ones, and the
gradient of the weights in particular takes it several times what the memory traffic would. On a GPU
and in bfloat16 these are Triton kernels, elsewhere PyTorch's own. Operators rather than a function
with kernels inside, so that whoever watches the operations sees what depends on what.

Weights are (networks, 3, 3, channels in, channels out), in full precision: as the kernels read and
write them, so that nothing is cast, turned or filled up between them. With micro-batches of a few
images it is the number of kernels that takes the time.
"""

from typing import Any

import torch
from benchmarks.accuracy.kernels import channels_last, draws, error_of, in_triton, tl, triton
from torch import Tensor
from torch.nn import functional as F

PIXELS_AT_ONCE = 128
LEAST_CHANNELS = 16
"""What a product of tiles takes."""
PIXELS_A_PART, MOST_PARTS = 512, 64
"""Into which the pixels are cut for the gradient of the weights, to be added up at the end."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _taps(  # type: ignore[no-untyped-def]
        x,
        w,
        y,
        pixels,
        networks,
        height_in,
        width_in,
        height,
        width,
        C_IN: tl.constexpr,
        C_TILE: tl.constexpr,
        C_OUT: tl.constexpr,
        STRIDE: tl.constexpr,
        TRANSPOSED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """y = x * w of one network, BLOCK pixels; TRANSPOSED: the gradient of x from that of y."""
        network = tl.program_id(0)
        pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = pixel // (height * width)
        i = (pixel // width) % height
        j = pixel % width
        c_in = tl.arange(0, C_TILE)
        c_out = tl.arange(0, C_OUT)
        total = tl.zeros((BLOCK, C_OUT), tl.float32)
        for tap in tl.static_range(9):
            if TRANSPOSED:
                down = i + 1 - tap // 3
                across = j + 1 - tap % 3
                there = (down >= 0) & (across >= 0) & (down % STRIDE == 0) & (across % STRIDE == 0)
                down = down // STRIDE
                across = across // STRIDE
            else:
                down = i * STRIDE + tap // 3 - 1
                across = j * STRIDE + tap % 3 - 1
                there = (down >= 0) & (across >= 0)
            there = there & (down < height_in) & (across < width_in) & (pixel < pixels)
            place = ((row * height_in + down) * width_in + across) * networks + network
            seen = tl.load(
                x + place[:, None] * C_IN + c_in[None, :],
                mask=there[:, None] & (c_in < C_IN)[None, :],
                other=0.0,
            )
            of_tap = w + (network * 9 + tap) * C_IN * C_OUT
            if TRANSPOSED:  # what comes in here is what goes out of the convolution
                weight = tl.load(of_tap + c_out[:, None] * C_IN + c_in[None, :])
                total += tl.dot(seen, tl.trans(weight.to(seen.dtype)))
            else:
                weight = tl.load(
                    of_tap + c_in[:, None] * C_OUT + c_out[None, :],
                    mask=(c_in < C_IN)[:, None],
                    other=0.0,
                )
                total += tl.dot(seen, weight.to(seen.dtype))
        tl.store(
            y + (pixel * networks + network)[:, None] * C_OUT + c_out[None, :],
            total.to(y.dtype.element_ty),
            mask=(pixel < pixels)[:, None],
        )

    @triton.jit  # type: ignore[untyped-decorator]
    def _shifted(  # type: ignore[no-untyped-def]
        x, row, down, across, usable, networks, network, height_in, width_in, c_in,
        C_IN: tl.constexpr,
    ):  # fmt: skip
        there = usable & (down >= 0) & (across >= 0) & (down < height_in) & (across < width_in)
        place = ((row * height_in + down) * width_in + across) * networks + network
        return tl.load(
            x + place[:, None] * C_IN + c_in[None, :],
            mask=there[:, None] & (c_in < C_IN)[None, :],
            other=0.0,
        )

    @triton.jit  # type: ignore[untyped-decorator]
    def _weight_gradient(  # type: ignore[no-untyped-def]
        x,
        dy,
        out,
        pixels,
        blocks,
        networks,
        height_in,
        width_in,
        height,
        width,
        C_IN: tl.constexpr,
        C_TILE: tl.constexpr,
        C_OUT: tl.constexpr,
        STRIDE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A row of three taps of one network, over so many blocks of pixels."""
        taps = tl.program_id(0)
        network = tl.program_id(1)
        part = tl.program_id(2)
        c_in = tl.arange(0, C_TILE)
        c_out = tl.arange(0, C_OUT)
        left = tl.zeros((C_TILE, C_OUT), tl.float32)
        middle = tl.zeros((C_TILE, C_OUT), tl.float32)
        right = tl.zeros((C_TILE, C_OUT), tl.float32)
        for block in range(blocks):
            pixel = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            usable = pixel < pixels
            row = pixel // (height * width)
            down = ((pixel // width) % height) * STRIDE + taps - 1
            across = (pixel % width) * STRIDE
            back = tl.load(
                dy + (pixel * networks + network)[:, None] * C_OUT + c_out[None, :],
                mask=usable[:, None],
                other=0.0,
            )
            seen = _shifted(x, row, down, across - 1, usable, networks, network, height_in,
                            width_in, c_in, C_IN)  # fmt: skip
            left += tl.dot(tl.trans(seen), back)
            seen = _shifted(x, row, down, across, usable, networks, network, height_in,
                            width_in, c_in, C_IN)  # fmt: skip
            middle += tl.dot(tl.trans(seen), back)
            seen = _shifted(x, row, down, across + 1, usable, networks, network, height_in,
                            width_in, c_in, C_IN)  # fmt: skip
            right += tl.dot(tl.trans(seen), back)
        first = out + ((part * networks + network) * 9 + 3 * taps) * C_IN * C_OUT
        place = first + c_in[:, None] * C_OUT + c_out[None, :]
        wanted = (c_in < C_IN)[:, None]
        tl.store(place, left, mask=wanted)
        tl.store(place + C_IN * C_OUT, middle, mask=wanted)
        tl.store(place + 2 * C_IN * C_OUT, right, mask=wanted)


def _images(like: Tensor, *shape: int) -> Tensor:
    """Memory for images, which lie channels last on every path: who compiles relies on it."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _launch_taps(x: Tensor, weight: Tensor, y: Tensor, stride: int, transposed: bool) -> None:
    networks, _, _, c_in, c_out = weight.shape
    if transposed:
        c_in, c_out = c_out, c_in
    pixels = y.numel() // (networks * c_out)
    _taps[(networks, triton.cdiv(pixels, PIXELS_AT_ONCE))](
        x, weight, y, pixels, networks, *x.shape[2:], *y.shape[2:],
        C_IN=c_in, C_TILE=max(LEAST_CHANNELS, c_in), C_OUT=c_out,
        STRIDE=stride, TRANSPOSED=transposed, BLOCK=PIXELS_AT_ONCE,
    )  # fmt: skip


def _launch_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int) -> Tensor:
    networks, _, _, c_in, c_out = weight.shape
    pixels = dy.numel() // (networks * c_out)
    parts = max(1, min(MOST_PARTS, pixels // PIXELS_A_PART))
    blocks = triton.cdiv(triton.cdiv(pixels, parts), PIXELS_AT_ONCE)
    out = torch.empty((parts, *weight.shape), dtype=torch.float32, device=x.device)
    _weight_gradient[(3, networks, parts)](
        x, dy, out, pixels, blocks, networks, *x.shape[2:], *dy.shape[2:],
        C_IN=c_in, C_TILE=max(LEAST_CHANNELS, c_in), C_OUT=c_out, STRIDE=stride,
        BLOCK=PIXELS_AT_ONCE,
    )  # fmt: skip
    return out.sum(0) if parts > 1 else out[0]


def as_groups(weight: Tensor) -> Tensor:
    """What ``F.conv2d`` takes with a group per network."""
    return weight.permute(0, 4, 3, 1, 2).flatten(0, 1)


def _output_shape(x: Tensor, weight: Tensor, stride: int) -> tuple[int, int, int, int]:
    channels = weight.shape[0] * weight.shape[4]
    return len(x), channels, -(-x.shape[2] // stride), -(-x.shape[3] // stride)


@torch.library.custom_op("offbeat_benchmarks::conv3x3", mutates_args=())
def _forward(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if not in_triton(x):
        groups = as_groups(weight).to(x.dtype)
        return channels_last(F.conv2d(x, groups, stride=stride, padding=1, groups=len(weight)))
    y = _images(x, *_output_shape(x, weight, stride))
    _launch_taps(channels_last(x), weight, y, stride, transposed=False)
    return y


@torch.library.custom_op("offbeat_benchmarks::conv3x3_backward", mutates_args=())
def _backward(
    x: Tensor, weight: Tensor, dy: Tensor, stride: int, wanted: bool
) -> tuple[Tensor, Tensor]:
    if not in_triton(x):
        networks, _, _, c_in, c_out = weight.shape
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dy, x, as_groups(weight).to(x.dtype), None, [stride] * 2, [1, 1], [1, 1], False, [0, 0],
            networks, [wanted, True, False],
        )  # fmt: skip
        gradient = dw.view(networks, c_out, c_in, 3, 3).permute(0, 3, 4, 2, 1)
        dx = channels_last(dx) if wanted else x.new_empty(0)
        return dx, gradient.to(weight.dtype).contiguous()
    x, dy = channels_last(x), channels_last(dy)
    dx = torch.empty_like(x) if wanted else x.new_empty(0)
    if wanted:
        _launch_taps(dy, weight, dx, stride, transposed=True)
    return dx, _launch_weight_gradient(x, dy, weight, stride)


@_forward.register_fake
def _shape_of_output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return _images(x, *_output_shape(x, weight, stride))


@_backward.register_fake
def _shapes_of_gradients(
    x: Tensor, weight: Tensor, dy: Tensor, stride: int, wanted: bool
) -> tuple[Tensor, Tensor]:
    del dy, stride
    return (_images(x, *x.shape) if wanted else x.new_empty(0)), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    del output
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    dx, dw = _backward(x, weight, dy, ctx.stride, wanted)
    return (dx if wanted else None), dw, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def conv3x3(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """A convolution with padding 1 per network, each on its own group of channels."""
    made: Tensor = _forward(x, weight, stride)
    return made


def largest_error(device: torch.device) -> float:
    """Relative, against PyTorch's own convolutions in full precision, over all shapes in use."""
    drawn, networks, worst = draws(device), 3, 0.0
    for c_in, c_out, side, stride in (
        (3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2),
        (64, 64, 8, 1),
    ):  # fmt: skip
        x = channels_last(drawn(20, networks * c_in, side, side)).requires_grad_(c_in > 3)
        weight = drawn(networks, 3, 3, c_in, c_out).float().requires_grad_()
        wanted = [t for t in (x, weight) if t.requires_grad]
        y = conv3x3(x, weight, stride)
        dy = drawn(*y.shape)
        found = [y, *torch.autograd.grad(y, wanted, dy)]
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight)]
        y = F.conv2d(exact[0], as_groups(exact[1]), stride=stride, padding=1, groups=networks)
        true = [y, *torch.autograd.grad(y, [t for t in exact if t.requires_grad], dy.double())]
        worst = max(worst, error_of(found, true))
    return worst
