"""The fused narrow products of `lora_linear`: dropout inside, no mask, no dropped copy of x, sums in float32.

The wide products, x Wᵀ and dy W, stay the vendor's; a kernel of ours would have to beat them first. Around them, with
x (T, I), dy and y (T, O) and everything else small, forward reads x and reads and writes y once more; backward reads x
and dy twice each and reads and writes dx once more. That is the floor of what is not a wide product.

- `down_kernel`: h = s drop(x) Aᵀ, and s dy B.
- `up_kernel`: y += s h Bᵀ in place, and dx += drop(g A).
- `outer_kernel`: gᵀ drop(x), and hᵀ dy, in parts over tokens that are then summed in a fixed order.

Imported only when chosen. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ._eager.products import Dropout

_PARTS = 256  # programs that outer_kernel aims at
_INTERPRETED = knobs.runtime.interpret  # @triton.jit decides this once, at import


@triton.jit
def _kept(value, row, column, threshold):
    """`value` where the dropout keeps it, else 0. `products.Dropout.keep` in a kernel."""
    word = (row[:, None] ^ column[None, :]) * 0x7FEB352D
    word = (word ^ ((word >> 15) & 0x1FFFF)) * -2073254261
    return tl.where(word >= threshold, value, 0.0)


@triton.jit
def down_kernel(
    x, a, row_words, column_words, out, T, C, R, x_t, a_r, a_c, scale, threshold,
    DROP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[t, r] = scale Σ_c drop(x)[t, c] a[r, c]."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    total = tl.zeros((BT, BR), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        seen = tl.load(x + t.to(tl.int64)[:, None] * x_t + c[None, :], (t < T)[:, None] & (c < C)[None, :], 0.0)
        if DROP:
            row, column = tl.load(row_words + t, t < T, 0), tl.load(column_words + c, c < C, 0)
            seen = _kept(seen, row, column, threshold)
        factor = tl.load(a + r[None, :] * a_r + c.to(tl.int64)[:, None] * a_c, (c < C)[:, None] & (r < R)[None, :], 0.0)
        total = tl.dot(seen, factor, total, input_precision="ieee")
    at = out + t.to(tl.int64)[:, None] * R + r[None, :]
    tl.store(at, (total * scale).to(out.dtype.element_ty), (t < T)[:, None] & (r < R)[None, :])


@triton.jit
def up_kernel(
    y, h, b, row_words, column_words, T, C, R, y_t, h_t, b_c, b_r, scale, threshold,
    DROP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y[t, c] += scale drop(Σ_r h[t, r] b[c, r])."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BT, BC), tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        left = tl.load(h + t.to(tl.int64)[:, None] * h_t + r[None, :], (t < T)[:, None] & (r < R)[None, :], 0.0)
        right = tl.load(b + c.to(tl.int64)[None, :] * b_c + r[:, None] * b_r, (r < R)[:, None] & (c < C)[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if DROP:
        row, column = tl.load(row_words + t, t < T, 0), tl.load(column_words + c, c < C, 0)
        total = _kept(total, row, column, threshold)
    at, inside = y + t.to(tl.int64)[:, None] * y_t + c[None, :], (t < T)[:, None] & (c < C)[None, :]
    tl.store(at, (tl.load(at, inside, 0.0).to(tl.float32) + total * scale).to(y.dtype.element_ty), inside)


@triton.jit
def outer_kernel(
    h, x, row_words, column_words, parts, T, C, R, SPAN, h_t, x_t, threshold,
    DROP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """parts[s, r, c] = Σ_t h[t, r] drop(x)[t, c] over SPAN tokens from s SPAN on, s = program_id(2)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    first = tl.program_id(2) * SPAN
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, SPAN, BT):
        t = first + start + tl.arange(0, BT)
        left = tl.load(h + t.to(tl.int64)[None, :] * h_t + r[:, None], (r < R)[:, None] & (t < T)[None, :], 0.0)
        seen = tl.load(x + t.to(tl.int64)[:, None] * x_t + c[None, :], (t < T)[:, None] & (c < C)[None, :], 0.0)
        if DROP:
            row, column = tl.load(row_words + t, t < T, 0), tl.load(column_words + c, c < C, 0)
            seen = _kept(seen, row, column, threshold)
        total = tl.dot(left, seen, total, input_precision="ieee")
    at = parts + (tl.program_id(2) * R + r[:, None]).to(tl.int64) * C + c[None, :]
    tl.store(at, total, (r < R)[:, None] & (c < C)[None, :])


def unsupported(x: Tensor) -> str | None:
    """Why the kernels cannot take this; None when they can."""
    if not x.is_cuda and not _INTERPRETED:
        return f"x is on {x.device}, and it needs CUDA (or TRITON_INTERPRET=1)"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}, and it takes float32, float16 and bfloat16"
    return None


def tiles(rank: int, half: bool, *, hashed: bool = False) -> dict[str, int]:
    """Tokens, columns and ranks of a tile, small enough to stay in registers.

    Float32 products, which use no tensor core, need more registers. So do 64 ranks, and hashing every element for the
    dropout before a product (``hashed``): with 64 columns triton 3.6 spills.
    """
    ranks = max(16, min(64, triton.next_power_of_2(rank)))
    if not half:
        return {"BT": 32, "BC": 32, "BR": min(ranks, 32)}
    return {"BT": 64, "BC": 32 if hashed or ranks == 64 else 64, "BR": ranks}


def _words(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    return (x, x) if rows is None or columns is None else (rows, columns)


@torch.library.custom_op("heads_lora::down", mutates_args=())
def down(x: Tensor, a: Tensor, scale: float, rows: Tensor | None, columns: Tensor | None, threshold: int) -> Tensor:
    """Scale drop(x) Aᵀ: (T, C), (R, C) → (T, R)."""
    (tokens, width), rank = x.shape, a.shape[0]
    out = x.new_empty(tokens, rank)
    if not x.numel():
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = tiles(rank, x.dtype != torch.float32, hashed=rows is not None)
    grid = (triton.cdiv(tokens, tile["BT"]), triton.cdiv(rank, tile["BR"]))
    down_kernel[grid](
        x, a, *_words(x, rows, columns), out, tokens, width, rank, x.stride(0), *a.stride(), scale, threshold,
        DROP=rows is not None, **tile,
    )  # fmt: skip
    return out


@down.register_fake
def _(x: Tensor, a: Tensor, scale: float, rows: Tensor | None, columns: Tensor | None, threshold: int) -> Tensor:
    return x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("heads_lora::up_", mutates_args=("y",))
def up_(
    y: Tensor, h: Tensor, b: Tensor, scale: float, rows: Tensor | None, columns: Tensor | None, threshold: int
) -> None:
    """Y += scale drop(h Bᵀ): (T, C), (T, R), (C, R)."""
    (tokens, width), rank = y.shape, h.shape[1]
    if not y.numel():
        return
    assert y.stride(1) == 1
    h, tile = h if h.stride(1) == 1 else h.contiguous(), tiles(rank, y.dtype != torch.float32)
    grid = (triton.cdiv(tokens, tile["BT"]), triton.cdiv(width, tile["BC"]))
    up_kernel[grid](
        y, h, b, *_words(y, rows, columns), tokens, width, rank, y.stride(0), h.stride(0), *b.stride(), scale,
        threshold, DROP=rows is not None, **tile,
    )  # fmt: skip


@torch.library.custom_op("heads_lora::outer", mutates_args=())
def outer(h: Tensor, x: Tensor, scale: float, rows: Tensor | None, columns: Tensor | None, threshold: int) -> Tensor:
    """Scale hᵀ drop(x): (T, R), (T, C) → (R, C)."""
    (tokens, width), rank = x.shape, h.shape[1]
    if not x.numel():
        return x.new_zeros(rank, width)
    h, x = (t if t.stride(1) == 1 else t.contiguous() for t in (h, x))
    tile = tiles(rank, x.dtype != torch.float32)
    across = triton.cdiv(width, tile["BC"]), triton.cdiv(rank, tile["BR"])
    count = max(1, min(_PARTS // (across[0] * across[1]), triton.cdiv(tokens, 4 * tile["BT"])))
    span = triton.cdiv(triton.cdiv(tokens, count), tile["BT"]) * tile["BT"]
    parts = x.new_empty(triton.cdiv(tokens, span), rank, width, dtype=torch.float32)
    outer_kernel[(*across, parts.shape[0])](
        h, x, *_words(x, rows, columns), parts, tokens, width, rank, span, h.stride(0), x.stride(0), threshold,
        DROP=rows is not None, **tile,
    )  # fmt: skip
    return (parts.sum(0) * scale).to(x.dtype)


@outer.register_fake
def _(h: Tensor, x: Tensor, scale: float, rows: Tensor | None, columns: Tensor | None, threshold: int) -> Tensor:
    return x.new_empty(h.shape[1], x.shape[1])


_NOTHING = (None, None, 0)


def add_(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, drop: Dropout | None) -> None:
    """`products.add_` by kernels."""
    up_(y, down(x, a, 1.0, *(drop or _NOTHING)), b, scale, *_NOTHING)


def gradients(
    grad: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    drop: Dropout | None,
    dx: Tensor | None,
    need_a: bool,
    need_b: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`products.gradients` by kernels."""
    da = db = None
    if dx is not None or need_a:
        g = down(grad, b.T, scale, *_NOTHING)
        if need_a:
            da = outer(g, x, 1.0, *(drop or _NOTHING))
        if dx is not None:
            up_(dx, g, a.T, 1.0, *(drop or _NOTHING))
    if need_b:
        db = outer(down(x, a, 1.0, *(drop or _NOTHING)), grad, scale, *_NOTHING).T
    return da, db
