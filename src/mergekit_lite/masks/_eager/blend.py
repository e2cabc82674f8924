"""Blend masked frozen weights into one weight, and compute the gradient of the masks.

Large weights are processed in pieces that fit a cache. For every granularity, the gradient is
dm_k = reduce(dW * W_k), which sums over the dimensions in which masks broadcast.

Products are added in float32 (float64 for float64 weights), in the order of the components, and the
sum is rounded once. `bake` uses the same operations, so a checkpoint holds the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from model_components._autograd import (
    Context,
    differentiable_gradients,
    launches_directly,
    wants_graph,
)

# elements blended at a time: as many as a CPU cache holds, or so many that few GPU launches suffice
_STRETCH = {"cpu": 1 << 18, "cuda": 1 << 24}


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which components are summed."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def pieces(total: int, size: int) -> Iterator[slice]:
    """Yield slices of length ``size`` that cover 0 to ``total``; the last may be shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def part_of(mask: Tensor, rows: slice, dim: int = 0) -> Tensor:
    """Return the part of a mask that belongs to a slice of a weight along ``dim``.

    A mask that is broadcast along ``dim`` is returned whole.
    """
    if mask.shape[dim] > 1:
        return mask[(slice(None),) * dim + (rows,)]
    return mask


def blend_plain(weights: Sequence[Tensor], masks: Tensor) -> Tensor:
    """Return Σ_k masks[k] * weights[k] by plain operations, for tracing and torch.func.

    The result is in the dtype of the sums, not yet rounded.
    """
    work = work_dtype(weights[0].dtype)
    total = weights[0].to(work) * masks[0]
    for weight, mask in zip(weights[1:], masks[1:], strict=True):
        total = total + weight.to(work) * mask
    return total


def _blend_piece(weights: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    work = work_dtype(weights[0].dtype)
    # a product with a mask of the work dtype needs no converted copy of the weight, except for
    # float8, which does not support such products
    if weights[0].dtype.itemsize == 1:
        weights = [weight.to(work) for weight in weights]
    total = torch.mul(weights[0], masks[0].to(work))
    for weight, mask in zip(weights[1:], masks[1:], strict=True):
        # two roundings, without a fused multiply-add, so that all devices give the same bits
        total += torch.mul(weight, mask.to(work))
    return total


def blend_eager(weights: Sequence[Tensor], masks: Tensor) -> Tensor:
    """Return Σ_k masks[k] * weights[k] without a gradient, in pieces that fit a cache."""
    first = weights[0]
    stretch = _STRETCH.get(first.device.type, 1 << 24)
    if first.numel() <= stretch:
        # weights may be transposed views, but the merged weight is contiguous, as in a stock layer
        return _blend_piece(weights, list(masks)).to(first.dtype).contiguous()
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    rows = first.shape[0]
    # pieces are whole rows, and a single row may have more than _STRETCH elements
    step = max(1, stretch * rows // first.numel())
    for piece in pieces(rows, step):
        out[piece] = _blend_piece([w[piece] for w in weights], [part_of(m, piece) for m in masks])
    return out


def reduce_eager(grad: Tensor, weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the gradient of masks of ``shape`` (K, ...): grad * W_k, summed to each mask's shape.

    Large gradients are processed in pieces that fit a cache.
    """
    work = work_dtype(grad.dtype)
    stretch = _STRETCH.get(grad.device.type, 1 << 24)
    if grad.numel() <= stretch:
        g = grad.to(work)
        parts = [torch.mul(g, weight).sum_to_size(tuple(shape[1:])) for weight in weights]
        return torch.stack(parts)
    out = torch.zeros(tuple(shape), dtype=work, device=grad.device)
    step = max(1, stretch * grad.shape[0] // grad.numel())
    for piece in pieces(grad.shape[0], step):
        g = grad[piece].to(work)
        for total, weight in zip(out, weights, strict=True):
            part = part_of(total, piece)
            # part is a view of total, so if masks broadcast over rows, the pieces add up in it
            part += torch.mul(g, weight[piece]).sum_to_size(part.shape)
    return out


class _BlendContext(Context, Protocol):
    fused: bool


class Blend(torch.autograd.Function):
    """The blend of frozen weights by masks, as an autograd function.

    Masks and weights are saved for backward, since they are in memory anyway.
    """

    @staticmethod
    def forward(ctx: _BlendContext, masks: Tensor, fused: bool, *weights: Tensor) -> Tensor:
        ctx.fused = fused
        ctx.save_for_backward(masks, *weights)
        return blend_any(weights, masks, fused)

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _BlendContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        masks, *weights = ctx.saved_tensors
        if wants_graph():

            def formula(masks: Tensor) -> Tensor:
                return blend_plain(weights, masks).to(grad.dtype)

            (gradient,) = differentiable_gradients(formula, [masks], [True], grad)
        else:
            gradient = reduce_any(grad, weights, masks.shape, ctx.fused).to(masks.dtype)
        return gradient, None, *[None] * len(weights)


def blend_any(weights: Sequence[Tensor], masks: Tensor, fused: bool) -> Tensor:
    """Return the blend without a gradient, computed with Triton if ``fused``, else with torch."""
    if fused:
        from .. import _triton

        run = _triton.launch_blend if launches_directly(weights[0]) else _triton.blend
        return run(list(weights), masks)
    return blend_eager(weights, masks)


def reduce_any(
    grad: Tensor, weights: Sequence[Tensor], shape: Sequence[int], fused: bool
) -> Tensor:
    """Return the masks' gradient, computed with Triton if ``fused``, else with torch."""
    if fused:
        from .. import _triton

        run = _triton.launch_reduce if launches_directly(grad) else _triton.reduce
        return run(grad, list(weights), list(shape))
    return reduce_eager(grad, weights, shape)
