"""The fused paths of `blend` and of the masks' gradient: each reads every weight once and writes no temporary.

Both are bound by bytes. Blending K weights of n elements of b bytes moves (K + 1) n b; the gradient's reduction moves
(K + 1) n b and writes almost nothing. Products and sums are rounded one by one (no fused multiply-add), so a GPU makes
the bits that the CPU makes, and a baked checkpoint holds them.

Imported only when chosen. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

MOST = 4
"""Components that a kernel takes; eager takes any number."""
_ROWS, _COLUMNS = 4, 256  # a tile: 8 elements a thread; 16 spill on sm_90
_INTERPRETED = knobs.runtime.interpret  # when kernels are made, which is now


@triton.jit
def _tile(rows, columns, r, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = r * ROWS + tl.arange(0, ROWS)[:, None]
    j = c * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return i.to(tl.int64), j, (i < rows) & (j < columns)


@triton.jit
def blend_kernel(
    w0, w1, w2, w3, masks, out, rows, columns, w_row, m_k, m_row, m_column,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ_k masks[k] * w_k over one (ROWS, COLUMNS) tile; mask strides are 0 where it is broadcast."""
    i, j, inside = _tile(rows, columns, tl.program_id(0), tl.program_id(1), ROWS, COLUMNS)
    at, place = i * w_row + j, i * m_row + j * m_column
    total = tl.load(w0 + at, inside, 0.0).to(tl.float32) * tl.load(masks + place, inside, 0.0)
    if K > 1:
        total += tl.load(w1 + at, inside, 0.0).to(tl.float32) * tl.load(masks + m_k + place, inside, 0.0)
    if K > 2:
        total += tl.load(w2 + at, inside, 0.0).to(tl.float32) * tl.load(masks + 2 * m_k + place, inside, 0.0)
    if K > 3:
        total += tl.load(w3 + at, inside, 0.0).to(tl.float32) * tl.load(masks + 3 * m_k + place, inside, 0.0)
    tl.store(out + i * columns + j, total.to(out.dtype.element_ty), inside)


@triton.jit
def _reduced(g, w, at, inside, out, k, rows, columns, i, j, r, c, KIND: tl.constexpr):
    product = g * tl.load(w + at, inside, 0.0).to(tl.float32)
    one = tl.arange(0, 1)
    if KIND == 0:  # element
        tl.store(out + k * rows * columns + i * columns + j, product, inside)
    elif KIND == 1:  # input: a partial sum for each band of rows
        place = out + (r * tl.num_programs(2) + k) * columns + j
        tl.store(place, tl.sum(product, 0)[None, :], j < columns)
    elif KIND == 2:  # output: a partial sum for each band of columns
        place = out + (c * tl.num_programs(2) + k) * rows + i
        tl.store(place, tl.sum(product, 1)[:, None], i < rows)
    else:  # scalar: a partial sum for each tile
        place = out + (r * tl.num_programs(1) + c) * tl.num_programs(2) + k
        tl.store(place + one, tl.sum(tl.sum(product, 1), 0) + tl.zeros((1,), tl.float32))


@triton.jit
def reduce_kernel(
    grad, w0, w1, w2, w3, out, rows, columns, g_row, w_row,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grad * w_k over one tile and one component, summed as the masks' granularity asks."""
    r, c, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j, inside = _tile(rows, columns, r, c, ROWS, COLUMNS)
    g = tl.load(grad + i * g_row + j, inside, 0.0).to(tl.float32)
    at = i * w_row + j
    if k == 0:
        _reduced(g, w0, at, inside, out, k, rows, columns, i, j, r, c, KIND)
    elif k == 1:
        _reduced(g, w1, at, inside, out, k, rows, columns, i, j, r, c, KIND)
    elif k == 2:
        _reduced(g, w2, at, inside, out, k, rows, columns, i, j, r, c, KIND)
    else:
        _reduced(g, w3, at, inside, out, k, rows, columns, i, j, r, c, KIND)


def unsupported(weights: list[Tensor]) -> str | None:
    """Why the kernels cannot take these weights; None when they can."""
    first = weights[0]
    if not first.is_cuda and not _INTERPRETED:
        return f"the weights are on {first.device}, and it needs CUDA (or TRITON_INTERPRET=1)"
    if first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the weights are {first.dtype}, and it takes float32, float16 and bfloat16"
    if len(weights) > MOST or first.dim() not in (1, 2):
        shape = list(first.shape)
        return f"there are {len(weights)} weights of shape {shape}, and it takes up to {MOST} vectors or matrices"
    return None


def _matrix(weight: Tensor) -> Tensor:
    """As (rows, columns) with columns side by side."""
    matrix = weight if weight.dim() == 2 else weight[None]
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _four(weights: list[Tensor]) -> tuple[list[Tensor], int]:
    made = [_matrix(w) for w in weights]
    if len({w.stride(0) for w in made}) > 1:
        made = [w.contiguous() for w in made]
    return [made[min(k, len(made) - 1)] for k in range(MOST)], made[0].stride(0)


def _shape(masks: list[int]) -> list[int]:
    """(K, rows, columns) of masks over vectors or matrices."""
    return masks if len(masks) == 3 else [masks[0], 1, masks[1]]


@torch.library.custom_op("mergekit_lite::blend", mutates_args=())
def blend(weights: list[Tensor], masks: Tensor) -> Tensor:
    """Σ_k masks[k] * weights[k] in one pass."""
    out = torch.empty_like(weights[0], memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    four, stride = _four(weights)
    rows, columns = four[0].shape
    m = masks.float().contiguous().view(_shape(list(masks.shape)))
    m_row, m_column = (m.stride(d) if m.shape[d] > 1 else 0 for d in (1, 2))
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    blend_kernel[grid](
        *four, m, out, rows, columns, stride, m.stride(0), m_row, m_column,
        K=len(weights), ROWS=_ROWS, COLUMNS=_COLUMNS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@blend.register_fake
def _(weights: list[Tensor], masks: Tensor) -> Tensor:
    return torch.empty_like(weights[0], memory_format=torch.contiguous_format)


@torch.library.custom_op("mergekit_lite::reduce", mutates_args=())
def reduce(grad: Tensor, weights: list[Tensor], shape: list[int]) -> Tensor:
    """Sum grad * W_k to masks of ``shape``, for every k; partial sums are added in a fixed order."""
    if not grad.numel():
        return torch.zeros(shape, dtype=torch.float32, device=grad.device)
    four, stride = _four(weights)
    g = _matrix(grad)
    rows, columns = g.shape
    count, m_rows, m_columns = _shape(shape)
    bands = triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
    full = m_rows == rows, m_columns == columns
    kind, parts = {
        (True, True): (0, [count, rows, columns]),
        (False, True): (1, [bands[0], count, columns]),
        (True, False): (2, [bands[1], count, rows]),
        (False, False): (3, [bands[0] * bands[1], count]),
    }[full]
    out = torch.empty(parts, dtype=torch.float32, device=grad.device)
    reduce_kernel[(*bands, count)](
        g, *four, out, rows, columns, g.stride(0), stride, KIND=kind, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    return (out if kind == 0 else out.sum(0)).view(shape)


@reduce.register_fake
def _(grad: Tensor, weights: list[Tensor], shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=grad.device)
