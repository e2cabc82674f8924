"""`blend`: a weight that is a sum of masked frozen weights, and the gradient of its masks.

The one gradient rule: dm_k = reduce(dW * W_k), whatever the granularity. What autograd would keep until backward, the
blended weight, is built again instead.

Sums over k are float32 (float64 for float64 weights), product by product, in the order of the components, and rounded
once. A baked checkpoint is made by the same operations, so it holds the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference

IMPLS = ("reference", "eager", "fused", "auto")
_STRETCH = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements blended at a time: what a cache holds; on a GPU, few launches


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over components are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pieces(total: int, size: int) -> Iterator[slice]:
    """Consecutive stretches of ``size``, the last one shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def part_of(mask: Tensor, rows: slice, dim: int = 0) -> Tensor:
    """The rows of a mask that belong to rows of a weight: all of it where it is broadcast."""
    return mask[(slice(None),) * dim + (rows,)] if mask.shape[dim] > 1 else mask


def _blend_piece(weights: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    work = work_dtype(weights[0].dtype)
    total = torch.mul(weights[0].to(work), masks[0])
    for weight, mask in zip(weights[1:], masks[1:], strict=True):
        total += torch.mul(weight.to(work), mask)  # two roundings, not a fused one: the same bits everywhere
    return total


def blend_eager(weights: Sequence[Tensor], masks: Tensor) -> Tensor:
    """Σ_k masks[k] * weights[k], by stretches that fit a cache; no gradient."""
    first = weights[0]
    out = torch.empty_like(first, memory_format=torch.contiguous_format)
    rows = first.shape[0] if first.dim() else 1
    if first.dim() == 0 or first.numel() == 0:
        return out.copy_(_blend_piece(weights, list(masks)))
    step = max(1, _STRETCH.get(first.device.type, 1 << 24) * rows // first.numel())
    for piece in pieces(rows, step):
        out[piece] = _blend_piece([w[piece] for w in weights], [part_of(m, piece) for m in masks])
    return out


def reduce_eager(grad: Tensor, weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """reduce(grad * W_k) for every k: the gradient of masks of ``shape`` (K, ...), by stretches that fit a cache."""
    work = work_dtype(grad.dtype)
    out = torch.zeros(tuple(shape), dtype=work, device=grad.device)
    if grad.numel() == 0:
        return out
    if grad.dim() == 0:
        return out.copy_(torch.stack([grad.to(work) * w for w in weights]).view(tuple(shape)))
    step = max(1, _STRETCH.get(grad.device.type, 1 << 24) * grad.shape[0] // grad.numel())
    for piece in pieces(grad.shape[0], step):
        g = grad[piece].to(work)
        for total, weight in zip(out, weights, strict=True):
            part = part_of(total, piece)
            part += torch.mul(g, weight[piece]).sum_to_size(part.shape)
    return out


def _frozen(weights: Sequence[Tensor], operation: str) -> None:
    if any(w.requires_grad for w in weights):
        raise ValueError(f"{operation}: a component's weight requires grad; only masks are trained, needed frozen ones")


def check(operation: str, weights: Sequence[Tensor], masks: Tensor, impl: str) -> None:
    """Refuse weights and masks that do not belong together."""
    if impl not in IMPLS:
        raise ValueError(f"{operation}: impl is {impl!r}, needed one of {', '.join(IMPLS)}")
    shapes, dtypes = {tuple(w.shape) for w in weights}, {w.dtype for w in weights}
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ValueError(f"{operation}: weights have shapes {sorted(shapes)} and dtypes {dtypes}, needed one of each")
    shape = shapes.pop()
    fits = masks.dim() == len(shape) + 1 and all(m in (1, n) for m, n in zip(masks.shape[1:], shape, strict=True))
    if not fits or masks.shape[0] != len(weights):
        raise ValueError(
            f"{operation}: masks have shape {list(masks.shape)}, but {len(weights)} weights of shape {list(shape)} "
            f"need ({len(weights)}, then {len(shape)} sizes that are 1 or the weight's)"
        )
    _frozen(weights, operation)


def uses_fused(impl: str, weights: Sequence[Tensor], operation: str) -> bool:
    """Whether the Triton path runs; an explicit choice that cannot run raises."""
    if impl != "fused":  # "auto" is eager until a row measured on a GPU says that the kernels are faster there
        return False
    from . import _triton

    reason = _triton.unsupported(list(weights))
    if reason is not None:
        raise ValueError(f"{operation}: impl 'fused' cannot run: {reason}")
    return True


class _Blend(torch.autograd.Function):
    """Saves the masks' shape and no tensor; the weights are frozen and resident, so references to them cost nothing."""

    @staticmethod
    def forward(ctx: Any, masks: Tensor, fused: bool, *weights: Tensor) -> Tensor:
        ctx.weights, ctx.shape, ctx.dtype, ctx.fused = weights, masks.shape, masks.dtype, fused
        return blend_any(weights, masks, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        made = reduce_any(grad, ctx.weights, ctx.shape, ctx.fused)
        return made.to(ctx.dtype), None, *[None] * len(ctx.weights)


def blend_any(weights: Sequence[Tensor], masks: Tensor, fused: bool) -> Tensor:
    """The blend by the path that `uses_fused` chose; no gradient."""
    if fused:
        from . import _triton

        return _triton.blend(list(weights), masks)
    return blend_eager(weights, masks)


def reduce_any(grad: Tensor, weights: Sequence[Tensor], shape: Sequence[int], fused: bool) -> Tensor:
    """The reduction by the path that `uses_fused` chose."""
    if fused:
        from . import _triton

        return _triton.reduce(grad, list(weights), list(shape))
    return reduce_eager(grad, weights, shape)


def blend(weights: Sequence[Tensor], masks: Tensor, *, impl: str = "auto") -> Tensor:
    """The merged weight Σ_k masks[k] * weights[k], summed in float32, rounded once. Differentiable in the masks.

    Keeps nothing for backward but references to the frozen weights.

    Args:
        weights: K frozen tensors of one shape and dtype.
        masks: (K, then sizes that broadcast over a weight).
        impl: ``"reference"``, ``"eager"``, ``"fused"`` (Triton) or ``"auto"``: eager.

    Raises:
        ValueError: Shapes or dtypes that do not fit, a weight that requires grad, fused where it cannot run.

    >>> blend([torch.ones(2, 2), torch.zeros(2, 2)], torch.tensor([[[0.25, 1.0]], [[0.5, 0.5]]]))
    tensor([[0.2500, 1.0000],
            [0.2500, 1.0000]])
    """
    check("blend", weights, masks, impl)
    if impl == "reference":
        return reference.blend(weights, masks).to(weights[0].dtype)
    return _Blend.apply(masks, uses_fused(impl, weights, "blend"), *weights)
