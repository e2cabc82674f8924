"""The fused path of `kron_linear` for one term with balanced factors.

A token is a matrix X (I1, I2), and its output is A X Bᵀ. Both factors stay on chip while a program
processes its tokens, so that x is read once and y is written once. This moves N (I + O) b bytes for
N tokens with b bytes per element. The backward pass reads x and the output's gradient, and writes
dx. The intermediate results between two products stay in registers.

The module is imported only when this path is chosen. With TRITON_INTERPRET=1 the kernels run on
CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from model_components._fused import on_device_of

_LEAST = 16  # `tl.dot` needs sides of at least 16
_MOST = 128
# most elements of a factor whose sides are rounded up to powers of 2: two larger factors and their
# sums do not fit into the shared memory of a B200
_ELEMENTS = 8192
# The number of tokens per forward program, and of programs per backward pass: three for each of an
# H100's 132 multiprocessors. On an H100, a batch of 16,384 tokens was fastest with these values and
# with the values of num_stages below.
_TOKENS = 8
_PROGRAMS = 396
_FOUR_WARPS_UP_TO = 4096  # elements of the largest product; larger ones get 8 warps
# Triton reads TRITON_INTERPRET when it decorates kernels, so the setting is read once, here
_INTERPRETED = knobs.runtime.interpret


@triton.jit
def _load(pointer, rows: tl.constexpr, columns: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Load a row-major matrix (rows, columns), padded with zeros to a tile (R, C)."""
    i = tl.arange(0, R)[:, None]
    j = tl.arange(0, C)[None, :]
    if rows == R and columns == C:
        return tl.load(pointer + i * columns + j)
    else:
        return tl.load(pointer + i * columns + j, (i < rows) & (j < columns), 0.0)


@triton.jit
def _store(
    pointer, tile, rows: tl.constexpr, columns: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    i = tl.arange(0, R)[:, None]
    j = tl.arange(0, C)[None, :]
    value = tile.to(pointer.dtype.element_ty)
    if rows == R and columns == C:
        tl.store(pointer + i * columns + j, value)
    else:
        tl.store(pointer + i * columns + j, value, (i < rows) & (j < columns))


@triton.jit
def forward_kernel(
    x,
    a,
    b,
    out,
    tokens,
    O1: tl.constexpr,
    I1: tl.constexpr,
    O2: tl.constexpr,
    I2: tl.constexpr,
    P1: tl.constexpr,
    U1: tl.constexpr,
    P2: tl.constexpr,
    U2: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute A X Bᵀ for up to TOKENS tokens. P and U are O and I rounded up to powers of 2."""
    # the padding of the factors adds nothing to any product
    large = _load(a, O1, I1, P1, U1)
    small = tl.trans(_load(b, O2, I2, P2, U2))
    # int64, since 131,072 tokens of width 16,384 have 2³¹ elements
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for k in tl.range(0, tl.minimum(TOKENS, tokens - first), num_stages=3):
        n = first + k
        t = _load(x + n * (I1 * I2), I1, I2, U1, U2)
        s = tl.dot(large, t, input_precision="ieee").to(t.dtype)
        y = tl.dot(s, small, input_precision="ieee")
        _store(out + n * (O1 * O2), y, O1, O2, P1, P2)


@triton.jit
def backward_kernel(
    grad,
    x,
    a,
    b,
    dx,
    da,
    db,
    tokens,
    O1: tl.constexpr,
    I1: tl.constexpr,
    O2: tl.constexpr,
    I2: tl.constexpr,
    P1: tl.constexpr,
    U1: tl.constexpr,
    P2: tl.constexpr,
    U2: tl.constexpr,
):
    """Compute dX = Aᵀ dS, dA = Σ dS Xᵀ and dB = Σ Gᵀ (A X), where dS = G B.

    A program takes every num_programs-th token and writes one partial sum of dA and of dB.
    """
    large = _load(a, O1, I1, P1, U1)
    small = _load(b, O2, I2, P2, U2)
    # in float32, since a half-precision sum over many tokens would stop growing
    total_a = tl.zeros((P1, U1), tl.float32)
    total_b = tl.zeros((P2, U2), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    for k in tl.range(0, tl.cdiv(tokens - program, programs), num_stages=1):
        n = program + k * programs
        t = _load(x + n * (I1 * I2), I1, I2, U1, U2)
        g = _load(grad + n * (O1 * O2), O1, O2, P1, P2)
        s = tl.dot(large, t, input_precision="ieee").to(t.dtype)
        total_b = tl.dot(tl.trans(g), s, total_b, input_precision="ieee")
        ds = tl.dot(g, small, input_precision="ieee").to(t.dtype)
        total_a = tl.dot(ds, tl.trans(t), total_a, input_precision="ieee")
        _store(
            dx + n * (I1 * I2),
            tl.dot(tl.trans(large), ds, input_precision="ieee"),
            I1,
            I2,
            U1,
            U2,
        )
    _store(da + program * (O1 * I1), total_a, O1, I1, P1, U1)
    _store(db + program * (O2 * I2), total_b, O2, I2, P2, U2)


def unsupported(
    rank: int, sides: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why the kernels do not support these factors, or None if they do.

    Args:
        rank: Number of terms.
        sides: The sides of the factors, (O1, I1, O2, I2).
        device: The device of the factors.
        dtype: The dtype of the factors.
    """
    if device.type != "cuda" and not _INTERPRETED:
        return f"expected factors on a CUDA device (or TRITON_INTERPRET=1), got {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"expected a GPU of compute capability 8.0 or higher, got {capability}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"expected factors of dtype float16 or bfloat16, got {dtype}"
    tiles = [triton.next_power_of_2(side) for side in sides]
    fits = max(tiles[0] * tiles[1], tiles[2] * tiles[3]) <= _ELEMENTS
    if rank == 1 and fits and min(sides) >= _LEAST and max(sides) <= _MOST:
        return None
    return (
        f"expected rank 1, sides from {_LEAST} to {_MOST} and, with sides rounded up to powers "
        f"of 2, at most {_ELEMENTS} elements in a factor; got rank {rank} and "
        f"(O1, I1, O2, I2) = {sides}"
    )


def has_backward(x: Tensor) -> bool:
    """Return whether to run the backward kernel, whose registers spill on GPUs before Hopper."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)


def _sizes(a: Tensor, b: Tensor) -> dict[str, int]:
    """Return the kernels' constants, and the number of warps, for factors (O1, I1) and (O2, I2)."""
    sides = dict(zip(("O1", "I1", "O2", "I2"), (*a.shape, *b.shape), strict=True))
    tiles = zip(("P1", "U1", "P2", "U2"), sides.values(), strict=True)
    sides |= {name: triton.next_power_of_2(side) for name, side in tiles}
    widest = max(sides["P1"], sides["U1"]) * max(sides["P2"], sides["U2"])
    sides["num_warps"] = 4 if widest <= _FOUR_WARPS_UP_TO else 8
    return sides


def launch_forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:  # (N, I), (O1, I1), (O2, I2)
    """Return A X Bᵀ for every token, (N, O)."""
    out = x.new_empty(len(x), len(a) * len(b))
    if len(x):
        grid = (triton.cdiv(len(x), _TOKENS),)
        tensors = (x.contiguous(), a.contiguous(), b.contiguous())
        with on_device_of(out):
            forward_kernel[grid](*tensors, out, len(x), **_sizes(a, b), TOKENS=_TOKENS)
    return out


# An operator for torch.compile. Calling the operator costs more than the launch itself, so eager
# code calls `launch_forward` directly.
forward = torch.library.custom_op("kronecker::balanced", launch_forward, mutates_args=())


@forward.register_fake
def _(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x.new_empty(len(x), len(a) * len(b))


def launch_backward(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # (N, O), (N, I), (O1, I1), (O2, I2)
    """Return the gradients of x, A and B. Partial sums are added in a fixed order."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    programs = min(len(x), _PROGRAMS)
    parts_a = x.new_empty(programs, *a.shape, dtype=torch.float32)
    parts_b = x.new_empty(programs, *b.shape, dtype=torch.float32)
    if programs:
        tensors = (grad.contiguous(), x.contiguous(), a.contiguous(), b.contiguous())
        with on_device_of(dx):
            backward_kernel[(programs,)](*tensors, dx, parts_a, parts_b, len(x), **_sizes(a, b))
    return dx, parts_a.sum(0).to(a.dtype), parts_b.sum(0).to(b.dtype)


backward = torch.library.custom_op("kronecker::balanced_backward", launch_backward, mutates_args=())


@backward.register_fake
def _(grad: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, a, b)]
    return gradients[0], gradients[1], gradients[2]
