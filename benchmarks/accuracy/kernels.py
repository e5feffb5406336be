"""3x3 convolutions of many small networks at once, as two operators.

cuDNN's grouped convolutions are made for few wide groups; here are many narrow ones, and the
gradient of the weights in particular takes it several times what the memory traffic would. On a GPU
and in bfloat16 these are Triton kernels, elsewhere PyTorch's own. Operators rather than a function
with kernels inside, so that whoever watches the operations sees what depends on what.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for the CPU comes without
    triton = None

PIXELS_AT_ONCE = 128
LEAST_CHANNELS = 16
"""What a product of tiles takes."""
MOST_PARTS = 16
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
            weight = tl.load(
                w + (network * 9 + tap) * C_TILE * C_OUT + c_in[:, None] * C_OUT + c_out[None, :]
            )
            total += tl.dot(seen, weight)
        tl.store(
            y + (pixel * networks + network)[:, None] * C_OUT + c_out[None, :],
            total.to(y.dtype.element_ty),
            mask=(pixel < pixels)[:, None],
        )

    @triton.jit  # type: ignore[untyped-decorator]
    def _weight_gradient(  # type: ignore[no-untyped-def]
        x,
        dy,
        out,
        pixels,
        share,
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
        """One tap of one network, over ``share`` pixels."""
        tap = tl.program_id(0)
        network = tl.program_id(1)
        part = tl.program_id(2)
        c_in = tl.arange(0, C_TILE)
        c_out = tl.arange(0, C_OUT)
        total = tl.zeros((C_TILE, C_OUT), tl.float32)
        for start in range(part * share, (part + 1) * share, BLOCK):
            pixel = start + tl.arange(0, BLOCK)
            row = pixel // (height * width)
            down = ((pixel // width) % height) * STRIDE + tap // 3 - 1
            across = (pixel % width) * STRIDE + tap % 3 - 1
            there = (down >= 0) & (across >= 0) & (down < height_in) & (across < width_in)
            there = there & (pixel < pixels)
            place = ((row * height_in + down) * width_in + across) * networks + network
            seen = tl.load(
                x + place[:, None] * C_IN + c_in[None, :],
                mask=there[:, None] & (c_in < C_IN)[None, :],
                other=0.0,
            )
            back = tl.load(
                dy + (pixel * networks + network)[:, None] * C_OUT + c_out[None, :],
                mask=(pixel < pixels)[:, None],
                other=0.0,
            )
            total += tl.dot(tl.trans(seen), back)
        place = (part * networks + network) * 9 + tap
        tl.store(out + place * C_TILE * C_OUT + c_in[:, None] * C_OUT + c_out[None, :], total)


def _in_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda and x.dtype == torch.bfloat16


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _images(like: Tensor, *shape: int) -> Tensor:
    """Memory for images, which lie channels last on every path: who compiles relies on it."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _launch_taps(x: Tensor, taps: Tensor, y: Tensor, stride: int, transposed: bool) -> None:
    networks, _, tile, c_out = taps.shape
    pixels = y.numel() // (networks * c_out)
    _taps[(networks, triton.cdiv(pixels, PIXELS_AT_ONCE))](
        x, taps, y, pixels, networks, *x.shape[2:], *y.shape[2:],
        C_IN=x.shape[1] // networks, C_TILE=tile, C_OUT=c_out,
        STRIDE=stride, TRANSPOSED=transposed, BLOCK=PIXELS_AT_ONCE,
    )  # fmt: skip


def _output_shape(x: Tensor, weight: Tensor, stride: int) -> tuple[int, int, int, int]:
    return len(x), len(weight), -(-x.shape[2] // stride), -(-x.shape[3] // stride)


@torch.library.custom_op("offbeat_benchmarks::conv3x3", mutates_args=())
def _forward(x: Tensor, weight: Tensor, networks: int, stride: int) -> Tensor:
    if not _in_triton(x):
        return _channels_last(F.conv2d(x, weight, stride=stride, padding=1, groups=networks))
    x = _channels_last(x)
    # (networks, tap, in, out), the channels that go in filled up to a tile
    taps = weight.view(networks, -1, weight.shape[1], 9).permute(0, 3, 2, 1)
    missing = max(0, LEAST_CHANNELS - weight.shape[1])
    y = _images(x, *_output_shape(x, weight, stride))
    _launch_taps(x, F.pad(taps, (0, 0, 0, missing)).contiguous(), y, stride, transposed=False)
    return y


@torch.library.custom_op("offbeat_benchmarks::conv3x3_backward", mutates_args=())
def _backward(
    x: Tensor, weight: Tensor, dy: Tensor, networks: int, stride: int, wanted: bool
) -> tuple[Tensor, Tensor]:
    if not _in_triton(x):
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], networks,
            [wanted, True, False],
        )  # fmt: skip
        return (_channels_last(dx) if wanted else x.new_empty(0)), dw.contiguous()
    x, dy = _channels_last(x), _channels_last(dy)
    by_network = weight.view(networks, -1, weight.shape[1], 9)
    dx = torch.empty_like(x) if wanted else x.new_empty(0)
    if wanted:
        taps = by_network.permute(0, 3, 1, 2).contiguous()
        _launch_taps(dy, taps, dx, stride, transposed=True)
    c_out, c_in = by_network.shape[1:3]
    tile = max(LEAST_CHANNELS, c_in)
    pixels = dy.numel() // (networks * c_out)
    parts = max(1, min(MOST_PARTS, pixels // 1024))
    share = triton.cdiv(triton.cdiv(pixels, parts), PIXELS_AT_ONCE) * PIXELS_AT_ONCE
    out = torch.empty((parts, networks, 9, tile, c_out), dtype=torch.float32, device=x.device)
    _weight_gradient[(9, networks, parts)](
        x, dy, out, pixels, share, networks, *x.shape[2:], *dy.shape[2:],
        C_IN=c_in, C_TILE=tile, C_OUT=c_out, STRIDE=stride, BLOCK=PIXELS_AT_ONCE,
    )  # fmt: skip
    gradient = out.sum(0)[:, :, :c_in].permute(0, 3, 2, 1)
    return dx, gradient.reshape(weight.shape).to(weight.dtype).contiguous()


@_forward.register_fake
def _shape_of_output(x: Tensor, weight: Tensor, networks: int, stride: int) -> Tensor:
    del networks
    return _images(x, *_output_shape(x, weight, stride))


@_backward.register_fake
def _shapes_of_gradients(
    x: Tensor, weight: Tensor, dy: Tensor, networks: int, stride: int, wanted: bool
) -> tuple[Tensor, Tensor]:
    del dy, networks, stride
    return (_images(x, *x.shape) if wanted else x.new_empty(0)), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
    del output
    x, weight, ctx.networks, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    dx, dw = _backward(x, weight, dy, ctx.networks, ctx.stride, wanted)
    return (dx if wanted else None), dw, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def conv3x3(x: Tensor, weight: Tensor, networks: int, stride: int) -> Tensor:
    """``F.conv2d(x, weight, padding=1, stride=stride, groups=networks)``."""
    made: Tensor = _forward(x, weight, networks, stride)
    return made


def largest_error(device: torch.device) -> float:
    """Relative, against PyTorch's own convolutions in full precision, over all shapes in use."""
    generator = torch.Generator(device).manual_seed(0)
    networks, worst = 3, 0.0

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    for c_in, c_out, side, stride in (
        (3, 16, 32, 1), (16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2),
        (64, 64, 8, 1),
    ):  # fmt: skip
        x = _channels_last(drawn(20, networks * c_in, side, side)).requires_grad_(c_in > 3)
        weight = drawn(networks * c_out, c_in, 3, 3).requires_grad_()
        wanted = [t for t in (x, weight) if t.requires_grad]
        y = conv3x3(x, weight, networks, stride)
        dy = drawn(*y.shape)
        found = [y, *torch.autograd.grad(y, wanted, dy)]
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight)]
        y = F.conv2d(exact[0], exact[1], stride=stride, padding=1, groups=networks)
        true = [y, *torch.autograd.grad(y, [t for t in exact if t.requires_grad], dy.double())]
        for one, other in zip(found, true, strict=True):
            error = (one.detach().double() - other.detach()).norm() / other.detach().norm()
            worst = max(worst, float(error))
    return worst
