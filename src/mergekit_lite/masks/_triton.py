"""The Triton kernels of `blend` and of the masks' gradient.

Each kernel reads every weight once and writes no temporary tensor. Both are limited by memory
bandwidth: blending K weights of n elements with b bytes each moves (K + 1) n b bytes, and so does
the reduction of the masks' gradient, whose partial sums are few. Products and sums of a blend are
rounded one by one (no fused multiply-add), so a GPU gives the same bits as the CPU, and the
checkpoint that `bake` writes holds these bits.

This module is imported only when a fused path is chosen. With TRITON_INTERPRET=1 the kernels run on
CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from model_components._fused import on_device_of

# a kernel has one argument for each weight, so the number of weights is limited
MOST = 4
"""The maximum number of components in a kernel; the eager path takes any number."""
_ROWS, _COLUMNS = 4, 256  # a tile: 8 elements per thread; with 16, registers spill on sm_90
# tiles that a program sums before it writes: partial sums are a 128th of the bytes read
_STEPS = 32
_INTERPRETED = knobs.runtime.interpret  # read on import, because that is when kernels are created


@triton.jit
def _tile(rows, columns, r, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = r * ROWS + tl.arange(0, ROWS)[:, None]
    j = c * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    # row times stride exceeds 32 bits in a table of 262,144 rows with 8,192 columns
    return i.to(tl.int64), j, (i < rows) & (j < columns)


@triton.jit
def blend_kernel(
    w0,
    w1,
    w2,
    w3,
    masks,
    out,
    rows,
    columns,
    w_row,
    m_k,
    m_row,
    m_column,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute Σ_k masks[k] * w_k over one (ROWS, COLUMNS) tile.

    A mask's stride is 0 along a dimension in which the mask is broadcast.
    """
    # consecutive programs read neighboring columns
    bands = tl.cdiv(columns, COLUMNS)
    r = tl.program_id(0) // bands
    c = tl.program_id(0) % bands
    i, j, inside = _tile(rows, columns, r, c, ROWS, COLUMNS)
    at, place = i * w_row + j, i * m_row + j * m_column
    total = tl.load(w0 + at, inside, 0.0).to(tl.float32) * tl.load(masks + place, inside, 0.0)
    if K > 1:
        total += tl.load(w1 + at, inside, 0.0).to(tl.float32) * tl.load(
            masks + m_k + place, inside, 0.0
        )
    if K > 2:
        total += tl.load(w2 + at, inside, 0.0).to(tl.float32) * tl.load(
            masks + 2 * m_k + place, inside, 0.0
        )
    if K > 3:
        total += tl.load(w3 + at, inside, 0.0).to(tl.float32) * tl.load(
            masks + 3 * m_k + place, inside, 0.0
        )
    tl.store(out + i * columns + j, total.to(out.dtype.element_ty), inside)


@triton.jit
def reduce_kernel(
    grad,
    w0,
    w1,
    w2,
    w3,
    out,
    rows,
    columns,
    g_row,
    w_row,
    K: tl.constexpr,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum grad * w_k for every k.

    A program adds up STEPS tiles along the summed dimension and writes one partial sum.

    KIND 0 (element masks): no sum. KIND 1 (input): sum over rows. KIND 2 (output): sum over
    columns. KIND 3 (scalar): sum over both.
    """
    bands = tl.cdiv(columns, COLUMNS * STEPS if KIND == 2 else COLUMNS)
    r = tl.program_id(0) // bands
    c = tl.program_id(0) % bands
    DOWN: tl.constexpr = KIND == 1 or KIND == 3
    a0 = tl.zeros((ROWS, COLUMNS), tl.float32)
    a1 = tl.zeros((ROWS, COLUMNS), tl.float32)
    a2 = tl.zeros((ROWS, COLUMNS), tl.float32)
    a3 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        i, j, inside = _tile(
            rows,
            columns,
            r * STEPS + step if DOWN else r,
            c * STEPS + step if KIND == 2 else c,
            ROWS,
            COLUMNS,
        )
        g = tl.load(grad + i * g_row + j, inside, 0.0).to(tl.float32)
        at = i * w_row + j
        a0 += g * tl.load(w0 + at, inside, 0.0).to(tl.float32)
        if K > 1:
            a1 += g * tl.load(w1 + at, inside, 0.0).to(tl.float32)
        if K > 2:
            a2 += g * tl.load(w2 + at, inside, 0.0).to(tl.float32)
        if K > 3:
            a3 += g * tl.load(w3 + at, inside, 0.0).to(tl.float32)
    _put(a0, out, 0, rows, columns, r, c, K, KIND, ROWS, COLUMNS)
    if K > 1:
        _put(a1, out, 1, rows, columns, r, c, K, KIND, ROWS, COLUMNS)
    if K > 2:
        _put(a2, out, 2, rows, columns, r, c, K, KIND, ROWS, COLUMNS)
    if K > 3:
        _put(a3, out, 3, rows, columns, r, c, K, KIND, ROWS, COLUMNS)


@triton.jit
def _put(
    total,
    out,
    k,
    rows,
    columns,
    r,
    c,
    K: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a program's tile along the dimensions that ``KIND`` reduces, and write the result."""
    i = r * ROWS + tl.arange(0, ROWS)
    j = c * COLUMNS + tl.arange(0, COLUMNS)
    if KIND == 0:
        at = (k * rows + i).to(tl.int64)[:, None] * columns + j[None, :]
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        tl.store(out + at, total, inside)
    elif KIND == 1:
        tl.store(out + (r * K + k) * columns + j, tl.sum(total, 0), j < columns)
    elif KIND == 2:
        tl.store(out + (c * K + k) * rows + i, tl.sum(total, 1), i < rows)
    else:
        # a scalar mask's gradient is one number, whose float32 rounding errors do not average out
        tl.store(out + tl.program_id(0) * K + k, tl.sum(total.to(tl.float64)))


def unsupported(weights: list[Tensor]) -> str | None:
    """Return why the kernels cannot take these weights, or None if they can."""
    first = weights[0]
    if not first.is_cuda and not _INTERPRETED:
        return f"expected weights on CUDA (or TRITON_INTERPRET=1), got weights on {first.device}"
    if first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"expected weights of dtype float32, float16 or bfloat16, got {first.dtype}"
    if len(weights) > MOST or first.dim() not in (1, 2):
        shape = list(first.shape)
        return (
            f"got {len(weights)} weights of shape {shape}, expected up to {MOST} vectors or "
            "matrices"
        )
    return None


def _matrix(weight: Tensor) -> Tensor:
    """Return a tensor as (rows, columns) with contiguous rows; copy it only if necessary."""
    matrix = weight if weight.dim() == 2 else weight[None]
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _four(weights: list[Tensor]) -> tuple[list[Tensor], int]:
    matrices = [_matrix(w) for w in weights]
    # a kernel has one argument for the row stride of all weights
    if len({w.stride(0) for w in matrices}) > 1:
        matrices = [w.contiguous() for w in matrices]
    # the last weight stands in for missing weights, which the kernels never read
    return [matrices[min(k, len(matrices) - 1)] for k in range(MOST)], matrices[0].stride(0)


def _shape(masks: list[int]) -> list[int]:
    """Return the shape (K, rows, columns) of masks over vectors or matrices."""
    return masks if len(masks) == 3 else [masks[0], 1, masks[1]]


def launch_blend(weights: list[Tensor], masks: Tensor) -> Tensor:
    """Return Σ_k masks[k] * weights[k], computed in one pass."""
    out = torch.empty_like(weights[0], memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    four, stride = _four(weights)
    rows, columns = four[0].shape
    m = masks.float().contiguous().view(_shape(list(masks.shape)))
    m_row, m_column = (m.stride(d) if m.shape[d] > 1 else 0 for d in (1, 2))
    with on_device_of(out):
        blend_kernel[(triton.cdiv(columns, _COLUMNS) * triton.cdiv(rows, _ROWS),)](
            *four,
            m,
            out,
            rows,
            columns,
            stride,
            m.stride(0),
            m_row,
            m_column,
            K=len(weights),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            enable_fp_fusion=False,
        )
    return out


# an operator for torch.compile; calling an operator costs more than the launch itself, so all
# other code launches the kernel directly
blend = torch.library.custom_op("mergekit_lite::blend", launch_blend, mutates_args=())


@blend.register_fake
def _(weights: list[Tensor], masks: Tensor) -> Tensor:
    return torch.empty_like(weights[0], memory_format=torch.contiguous_format)


def launch_reduce(grad: Tensor, weights: list[Tensor], shape: list[int]) -> Tensor:
    """Return the masks' gradient: grad * W_k for every k, summed to ``shape``.

    Partial sums are added in a fixed order.
    """
    if not grad.numel():
        return torch.zeros(shape, dtype=torch.float32, device=grad.device)
    four, stride = _four(weights)
    g = _matrix(grad)
    rows, columns = g.shape
    count, m_rows, m_columns = _shape(shape)
    # whether masks have as many rows, and as many columns, as the weight
    kind = {(1, 1): 0, (0, 1): 1, (1, 0): 2, (0, 0): 3}[m_rows == rows, m_columns == columns]
    # a tile has 4 rows but 256 columns, so 4 tiles along the columns already sum 1,024 elements
    steps = {0: 1, 1: _STEPS, 2: _STEPS // 8, 3: _STEPS}[kind]
    down, along = (steps if kind in (1, 3) else 1), (steps if kind == 2 else 1)
    bands = triton.cdiv(rows, _ROWS * down), triton.cdiv(columns, _COLUMNS * along)
    parts = [
        [count, rows, columns],
        [bands[0], count, columns],
        [bands[1], count, rows],
        [*bands, count],
    ][kind]
    dtype = torch.float64 if kind == 3 else torch.float32
    out = torch.empty(parts, dtype=dtype, device=grad.device)
    with on_device_of(out):
        reduce_kernel[(bands[0] * bands[1],)](
            g,
            *four,
            out,
            rows,
            columns,
            g.stride(0),
            stride,
            K=count,
            KIND=kind,
            STEPS=steps,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
    if kind == 3:
        out = out.flatten(0, 1)
    return (out if kind == 0 else out.sum(0)).float().view(shape)


reduce = torch.library.custom_op("mergekit_lite::reduce", launch_reduce, mutates_args=())


@reduce.register_fake
def _(grad: Tensor, weights: list[Tensor], shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=grad.device)
