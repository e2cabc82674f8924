"""The fused path of `kron_linear`: the small factor is the prologue or the epilogue of one product with the large one.

Weight Σ_r A_r ⊗ B_r with B of a few elements. Forward and backward each read x, the gradient and A once per product and
write nothing between. Floor: r |A| min(O2, I2) multiply-adds a token, and the bytes of x, y and A.

- `inner_kernel` mixes columns of x by B while it loads them (rows are pairs of token and q), then multiplies by A.
- `outer_kernel` multiplies by A for every (r, v), then mixes the sums by B, or reduces them to the gradient of B.
- `factor_kernel` is the gradient of A: rows of the gradient against mixed columns of x.

A transposed A (strides) and B serve backward; the three kernels are enough for all gradients.
Imported only when chosen. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from model_components._autograd import Context

from ._eager import small_gradients

LARGEST = 8
"""Largest side of B that the kernels take."""
_SUMS = 4  # accumulators of outer_kernel
_M, _P, _U = 64, 64, 32  # tiles: rows, and A's two sides
WARPS = 8  # with 4, float32 products and what they are reduced against spill
_INTERPRETED = knobs.runtime.interpret  # when kernels are made, which is now


@triton.jit
def _mixed(x, b, rows, u, M, U, r, O2: tl.constexpr, I2: tl.constexpr, BM: tl.constexpr, BU: tl.constexpr):
    """t[(n, q), u] = Σ_v b[r, q, v] x[n, u, v] over one tile, float32."""
    n, q = rows // O2, rows % O2
    inside = (rows < M)[:, None] & (u < U)[None, :]
    at = n.to(tl.int64)[:, None] * (U * I2) + u[None, :] * I2
    t = tl.zeros((BM, BU), tl.float32)
    for v in tl.static_range(I2):
        weight = tl.load(b + (r * O2 + q) * I2 + v)
        t += weight[:, None] * tl.load(x + at + v, inside, 0.0).to(tl.float32)
    return t


@triton.jit
def inner_kernel(
    x, a, b, out, M, P, U, a_r, a_p, a_u,
    R: tl.constexpr, O2: tl.constexpr, I2: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """out[n, p, q] = Σ_{r, u} A[r, p, u] Σ_v b[r, q, v] x[n, u, v]; M rows are pairs (n, q)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    total = tl.zeros((BM, BP), tl.float32)
    for r in range(R):
        for start in range(0, U, BU):
            u = start + tl.arange(0, BU)
            t = _mixed(x, b, rows, u, M, U, r, O2, I2, BM, BU)
            place = a + r * a_r + u[:, None] * a_u + p[None, :] * a_p
            tile = tl.load(place, (u < U)[:, None] & (p < P)[None, :], 0.0)
            total = tl.dot(t.to(tile.dtype), tile, total, input_precision="ieee")
    at = (rows // O2).to(tl.int64)[:, None] * (P * O2) + p[None, :] * O2 + (rows % O2)[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), (rows < M)[:, None] & (p < P)[None, :])


@triton.jit
def outer_kernel(
    x, a, b, out, other, parts, N, P, U, a_r, a_p, a_u,
    R: tl.constexpr, O2: tl.constexpr, I2: tl.constexpr, MIX: tl.constexpr, REDUCE: tl.constexpr,
    SUMS: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """s_j[n, p] = Σ_u A[r, p, u] x[n, u, v] for SUMS pairs j = (r, v) from program_id(2) on.

    MIX: out[n, p, q] = Σ_j b[r, q, v] s_j. REDUCE: parts[tile, j, q] = Σ_{n, p} other[n, p, q] s_j.
    """
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    first = tl.program_id(2) * SUMS
    s0 = tl.zeros((BM, BP), tl.float32)
    s1 = tl.zeros((BM, BP), tl.float32)
    s2 = tl.zeros((BM, BP), tl.float32)
    s3 = tl.zeros((BM, BP), tl.float32)
    for start in range(0, U, BU):
        u = start + tl.arange(0, BU)
        s0 = _one(x, a, n, p, u, N, P, U, first, a_r, a_p, a_u, s0, I2)
        if SUMS > 1:
            s1 = _one(x, a, n, p, u, N, P, U, first + 1, a_r, a_p, a_u, s1, I2)
        if SUMS > 2:
            s2 = _one(x, a, n, p, u, N, P, U, first + 2, a_r, a_p, a_u, s2, I2)
        if SUMS > 3:
            s3 = _one(x, a, n, p, u, N, P, U, first + 3, a_r, a_p, a_u, s3, I2)
    inside = (n < N)[:, None] & (p < P)[None, :]
    at = n.to(tl.int64)[:, None] * (P * O2) + p[None, :] * O2
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for q in tl.static_range(O2):
        if MIX:
            y = s0 * _weight(b, first, q, O2, I2)
            if SUMS > 1:
                y += s1 * _weight(b, first + 1, q, O2, I2)
            if SUMS > 2:
                y += s2 * _weight(b, first + 2, q, O2, I2)
            if SUMS > 3:
                y += s3 * _weight(b, first + 3, q, O2, I2)
            tl.store(out + at + q, y.to(out.dtype.element_ty), inside)
        if REDUCE:
            g = tl.load(other + at + q, inside, 0.0).to(tl.float32)
            place = parts + (tile * (R * I2) + first) * O2 + q
            tl.store(place, tl.sum(tl.sum(s0 * g, 1), 0))
            if SUMS > 1:
                tl.store(place + O2, tl.sum(tl.sum(s1 * g, 1), 0))
            if SUMS > 2:
                tl.store(place + 2 * O2, tl.sum(tl.sum(s2 * g, 1), 0))
            if SUMS > 3:
                tl.store(place + 3 * O2, tl.sum(tl.sum(s3 * g, 1), 0))


@triton.jit
def _one(x, a, n, p, u, N, P, U, j, a_r, a_p, a_u, total, I2: tl.constexpr):
    """One tile's step of s_j."""
    r, v = j // I2, j % I2
    left = tl.load(
        x + n.to(tl.int64)[:, None] * (U * I2) + u[None, :] * I2 + v, (n < N)[:, None] & (u < U)[None, :], 0.0
    )
    right = tl.load(a + r * a_r + u[:, None] * a_u + p[None, :] * a_p, (u < U)[:, None] & (p < P)[None, :], 0.0)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _weight(b, j, q, O2: tl.constexpr, I2: tl.constexpr):
    r, v = j // I2, j % I2
    return tl.load(b + (r * O2 + q) * I2 + v)


@triton.jit
def factor_kernel(
    x, g, b, out, M, P, U, o_r, o_p, o_u,
    O2: tl.constexpr, I2: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """out[r, p, u] = Σ_{n, q} g[n, p, q] Σ_v b[r, q, v] x[n, u, v], r = program_id(2)."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    u = tl.program_id(1) * BU + tl.arange(0, BU)
    r = tl.program_id(2)
    total = tl.zeros((BP, BU), tl.float32)
    for start in range(0, M, BM):
        rows = start + tl.arange(0, BM)
        t = _mixed(x, b, rows, u, M, U, r, O2, I2, BM, BU)
        at = (rows // O2).to(tl.int64)[None, :] * (P * O2) + p[:, None] * O2 + (rows % O2)[None, :]
        left = tl.load(g + at, (p < P)[:, None] & (rows < M)[None, :], 0.0)
        total = tl.dot(left, t.to(left.dtype), total, input_precision="ieee")
    place = out + r * o_r + p[:, None].to(tl.int64) * o_p + u[None, :] * o_u
    tl.store(place, total.to(out.dtype.element_ty), (p < P)[:, None] & (u < U)[None, :])


def unsupported(x: Tensor, a: Tensor, b: Tensor) -> str | None:
    """Why the kernels cannot take this; None when they can."""
    if not x.is_cuda and not _INTERPRETED:
        return f"x is on {x.device}, and it needs CUDA (or TRITON_INTERPRET=1)"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}, and it takes float32, float16 and bfloat16"
    if max(b.shape[1:]) > LARGEST:
        return f"b has shape {list(b.shape)}, and it takes sides up to {LARGEST}"
    return None


def outer_block(sums: int) -> int:
    """Tile columns that leave registers for so many sums."""
    return _P if sums <= 2 else _P // 2


def factor_tiles(half: bool) -> dict[str, int]:
    """Tiles of factor_kernel: float32 products, which no tensor core makes, leave fewer registers."""
    return {"BM": 32, "BP": 64, "BU": 64, "num_warps": 8} if half else {"BM": 16, "BP": 32, "BU": 32, "num_warps": 4}


def _small(b: Tensor, scales: Tensor | None) -> Tensor:
    return (b.float() if scales is None else b.float() * scales.float().view(-1, 1, 1)).contiguous()


def _turned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.transpose(1, 2), b.transpose(1, 2).contiguous()


def _outer(x: Tensor, a: Tensor, b: Tensor, other: Tensor | None, mix: bool) -> tuple[Tensor, Tensor | None]:
    """Y when ``mix``, and the gradient of b, (R, O2, I2), when there is an ``other``."""
    (rank, p, u), (_, o2, i2) = a.shape, b.shape
    n, pairs = x.shape[0], rank * i2
    out = x.new_empty(n, p * o2) if mix else x
    sums = next(k for k in range(_SUMS, 0, -1) if pairs % k == 0)
    grid = (triton.cdiv(n, _M), triton.cdiv(p, outer_block(sums)), pairs // sums)
    parts = x.new_empty(grid[0] * grid[1], pairs, o2, dtype=torch.float32) if other is not None else x
    outer_kernel[grid](
        x, a, b, out, x if other is None else other, parts, n, p, u, *a.stride(),
        R=rank, O2=o2, I2=i2, MIX=mix, REDUCE=other is not None, SUMS=sums,
        BM=_M, BP=outer_block(sums), BU=_U, num_warps=WARPS,
    )  # fmt: skip
    return out, None if other is None else parts.sum(0).view(rank, i2, o2).transpose(1, 2)


def _apply(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """X times (Σ A ⊗ B)ᵀ by the cheaper kernel."""
    (rank, p, u), (_, o2, i2) = a.shape, b.shape
    if i2 < o2 and rank * i2 <= _SUMS:
        return _outer(x, a, b, None, True)[0]
    out, rows = x.new_empty(x.shape[0], p * o2), x.shape[0] * o2
    grid = (triton.cdiv(rows, _M), triton.cdiv(p, _P))
    inner_kernel[grid](
        x, a, b, out, rows, p, u, *a.stride(), R=rank, O2=o2, I2=i2, BM=_M, BP=_P, BU=_U, num_warps=WARPS
    )
    return out


def _gradient_of_a(x: Tensor, grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    (rank, p, u), (_, o2, i2) = a.shape, b.shape
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    strides = list(out.stride())
    if i2 < o2:  # mix the gradient instead of x
        x, grad, b, p, u, o2, i2 = grad, x, b.transpose(1, 2).contiguous(), u, p, i2, o2
        strides = [strides[0], strides[2], strides[1]]
    tiles = factor_tiles(x.dtype != torch.float32)
    grid = (triton.cdiv(p, tiles["BP"]), triton.cdiv(u, tiles["BU"]), rank)
    factor_kernel[grid](x, grad, b, out, x.shape[0] * o2, p, u, *strides, O2=o2, I2=i2, **tiles)
    return out


@torch.library.custom_op("kronecker::kron_matmul", mutates_args=())
def kron_matmul(x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None) -> Tensor:
    """X (N, I) times (Σ_r s_r A_r ⊗ B_r)ᵀ, in one kernel."""
    if not x.numel():
        return x.new_zeros(x.shape[0], a.shape[1] * b.shape[1])
    return _apply(x.contiguous(), a, _small(b, scales))


@kron_matmul.register_fake
def _(x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], a.shape[1] * b.shape[1])


@torch.library.custom_op("kronecker::kron_matmul_backward", mutates_args=())
def kron_matmul_backward(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None, need_x: bool, need_a: bool, need_b: bool
) -> list[Tensor]:
    """Gradients of x, A and, in float32, of B times the scales; what is not needed is empty."""
    if not x.numel():
        return [torch.zeros_like(t) for t in _like(x, a, b, need_x, need_a, need_b)]
    gradients = [x.new_empty(0), a.new_empty(0), b.new_empty(0, dtype=torch.float32)]
    x, grad, small = x.contiguous(), grad.contiguous(), _small(b, scales)
    turned = _turned(a, small)
    rank, o2, i2 = small.shape
    if need_a:
        gradients[1] = _gradient_of_a(x, grad, a, small)
    if need_b and o2 <= i2:
        both = need_x and rank * o2 <= _SUMS
        dx, db = _outer(grad, *turned, x, both)
        assert db is not None
        gradients[0] = dx if both else gradients[0]
        gradients[2] = db.transpose(1, 2).contiguous()
    elif need_b:
        db = _outer(x, a, small, grad, False)[1]
        assert db is not None
        gradients[2] = db.contiguous()
    if need_x and not gradients[0].numel():
        gradients[0] = _apply(grad, *turned)
    return gradients


def _like(x: Tensor, a: Tensor, b: Tensor, need_x: bool, need_a: bool, need_b: bool) -> list[Tensor]:
    """Tensors of the shapes and dtypes that backward returns."""
    return [
        torch.empty(t.shape if need else (0,), dtype=dtype, device=t.device)
        for t, need, dtype in ((x, need_x, x.dtype), (a, need_a, a.dtype), (b, need_b, torch.float32))
    ]


@kron_matmul_backward.register_fake
def _(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor | None, need_x: bool, need_a: bool, need_b: bool
) -> list[Tensor]:
    return _like(x, a, b, need_x, need_a, need_b)


def _saved(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, a, b, scales = ctx.saved_tensors
    need_x, need_a, need_b, need_scales = ctx.needs_input_grad
    dx, da, db = kron_matmul_backward(grad, x, a, b, scales, need_x, need_a, need_b or need_scales)
    small = small_gradients(db, b, scales) if need_b or need_scales else (None, None)
    return dx if need_x else None, da if need_a else None, *small


kron_matmul.register_autograd(_backward, setup_context=_saved)
