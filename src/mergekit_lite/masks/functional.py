"""`blend`, `masked_linear`, `masked_embedding`: weights that are sums of masked weights, and gradients for the masks.

The one gradient rule: dm_k = reduce(dW * W_k) with dW = Gᵀ X, whatever the granularity. What autograd would keep until
backward, the blended weight, is built again instead: one matrix of one layer at a time, and never two.

Sums over k are float32 (float64 for float64 weights), product by product, in the order of the components, and rounded
once. A baked checkpoint is made by the same operations, so it holds the same bits.

Letters: K components, O out_features, I in_features, V vocabulary, H hidden size, *B any leading shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference

IMPLS = ("reference", "eager", "fused", "auto")
_STRETCH = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements blended at a time: what a cache holds; on a GPU, few launches
_COLUMNS = 1 << 20  # elements of a weight that a step of backward builds
FEW_TOKENS = 8
"""Up to this many tokens ``mode="auto"`` is efficient (docs/performance.md)."""


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over components are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _pieces(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _part(mask: Tensor, rows: slice, dim: int = 0) -> Tensor:
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
    for piece in _pieces(rows, step):
        out[piece] = _blend_piece([w[piece] for w in weights], [_part(m, piece) for m in masks])
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
    for piece in _pieces(grad.shape[0], step):
        g = grad[piece].to(work)
        for total, weight in zip(out, weights, strict=True):
            part = _part(total, piece)
            part += torch.mul(g, weight[piece]).sum_to_size(part.shape)
    return out


def _frozen(weights: Sequence[Tensor], operation: str) -> None:
    if any(w.requires_grad for w in weights):
        raise ValueError(f"{operation}: a component's weight requires grad; only masks are trained, needed frozen ones")


def _check(operation: str, weights: Sequence[Tensor], masks: Tensor, impl: str) -> None:
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


def _fused(impl: str, weights: Sequence[Tensor], operation: str) -> bool:
    """Whether the Triton path runs; an explicit choice that cannot run raises."""
    if impl != "fused" and (impl != "auto" or not weights[0].is_cuda):
        return False
    from . import _triton

    reason = _triton.unsupported(list(weights))
    if reason is not None and impl == "fused":
        raise ValueError(f"{operation}: impl 'fused' cannot run: {reason}")
    return reason is None


class _Blend(torch.autograd.Function):
    """Saves the masks' shape and no tensor; the weights are frozen and resident, so references to them cost nothing."""

    @staticmethod
    def forward(ctx: Any, masks: Tensor, fused: bool, *weights: Tensor) -> Tensor:
        ctx.weights, ctx.shape, ctx.dtype, ctx.fused = weights, masks.shape, masks.dtype, fused
        return _blend(weights, masks, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        made = _reduce(grad, ctx.weights, ctx.shape, ctx.fused)
        return made.to(ctx.dtype), None, *[None] * len(ctx.weights)


def _blend(weights: Sequence[Tensor], masks: Tensor, fused: bool) -> Tensor:
    if fused:
        from . import _triton

        return _triton.blend(list(weights), masks)
    return blend_eager(weights, masks)


def _reduce(grad: Tensor, weights: Sequence[Tensor], shape: Sequence[int], fused: bool) -> Tensor:
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
        impl: ``"reference"``, ``"eager"``, ``"fused"`` (Triton) or ``"auto"``.

    Raises:
        ValueError: Shapes or dtypes that do not fit, a weight that requires grad, fused where it cannot run.

    >>> blend([torch.ones(2, 2), torch.zeros(2, 2)], torch.tensor([[[0.25, 1.0]], [[0.5, 0.5]]]))
    tensor([[0.2500, 1.0000],
            [0.2500, 1.0000]])
    """
    _check("blend", weights, masks, impl)
    if impl == "reference":
        return reference.blend(weights, masks).to(weights[0].dtype)
    return _Blend.apply(masks, _fused(impl, weights, "blend"), *weights)


def _column_blocks(weights: Sequence[Tensor], transposed: bool) -> Iterator[slice]:
    """Ranges of input columns (rows of a transposed weight): each is a complete part of dX, so nothing is summed."""
    out_features, in_features = weights[0].shape if not transposed else weights[0].shape[::-1]
    return _pieces(in_features, max(1, _COLUMNS // max(1, out_features)))


class _AccurateLinear(torch.autograd.Function):
    """Saves x and the masks. One product forward and two backward, for any number of components.

    The merged weight is built for the product and dropped, and built again in backward by blocks of input columns.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, masks: Tensor, bias: Tensor | None, transposed: bool, fused: bool, *weights: Tensor
    ) -> Tensor:
        ctx.weights, ctx.transposed, ctx.fused = weights, transposed, fused
        ctx.save_for_backward(x, masks)
        weight = _blend(weights, masks, fused).to(x.dtype)
        return linear(x, weight, bias, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        x, masks = ctx.saved_tensors
        need_x, need_masks, need_bias = ctx.needs_input_grad[:3]
        g, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = torch.empty_like(flat, memory_format=torch.contiguous_format) if need_x else None
        dm = torch.zeros(masks.shape, dtype=work_dtype(masks.dtype), device=masks.device) if need_masks else None
        dim = 0 if ctx.transposed else 1  # of a weight, where input columns are
        for columns in _column_blocks(ctx.weights, ctx.transposed):
            index = (slice(None),) * dim + (columns,)
            parts = [w[index] for w in ctx.weights]
            if dx is not None:
                weight = _blend(parts, _part(masks, columns, dim + 1), ctx.fused).to(g.dtype)
                dx[:, columns] = g @ (weight.T if ctx.transposed else weight)
            if dm is not None:
                dw = flat[:, columns].T @ g if ctx.transposed else g.T @ flat[:, columns]
                part = _part(dm, columns, dim + 1)
                part += _reduce(dw, parts, part.shape, ctx.fused)
        return (
            None if dx is None else dx.view_as(x),
            None if dm is None else dm.to(masks.dtype),
            g.sum(0) if need_bias else None,
            None,
            None,
            *[None] * len(ctx.weights),
        )


class _EfficientLinear(torch.autograd.Function):
    """Saves x and the masks. K products forward and K backward (2 K for output masks); no weight is ever built."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, masks: Tensor, bias: Tensor | None, transposed: bool, fused: bool, *weights: Tensor
    ) -> Tensor:
        ctx.weights, ctx.transposed = weights, transposed
        ctx.save_for_backward(x, masks)
        flat = x.reshape(-1, x.shape[-1])
        total: Tensor | None = None
        for weight, mask, output in _matrices(weights, masks, transposed):
            if output:
                term = torch.mm(flat, weight.T) * mask.to(x.dtype)
                total = term if total is None else total.add_(term)
            elif total is None:
                total = torch.mm(flat * mask.to(x.dtype), weight.T)
            else:
                total.addmm_(flat * mask.to(x.dtype), weight.T)
        assert total is not None
        if bias is not None:
            total += bias
        return total.view(*x.shape[:-1], total.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        x, masks = ctx.saved_tensors
        need_x, need_masks, need_bias = ctx.needs_input_grad[:3]
        g, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        work = work_dtype(masks.dtype)
        dx = torch.zeros(flat.shape, dtype=work_dtype(x.dtype), device=x.device) if need_x else None
        made: list[Tensor] = []
        for weight, mask, output in _matrices(ctx.weights, masks, ctx.transposed):
            product = torch.mm(g * mask.to(g.dtype) if output else g, weight)
            if dx is not None:
                dx += product if output else product * mask
            if need_masks:
                pair = (g, torch.mm(flat, weight.T)) if output else (flat, product)
                column = (pair[0].to(work) * pair[1]).sum(0)
                shape = masks.shape[1:]
                made.append((column.sum() if max(shape) == 1 else column).view(shape))
        return (
            None if dx is None else dx.to(x.dtype).view_as(x),
            torch.stack(made).to(masks.dtype) if need_masks else None,
            g.sum(0) if need_bias else None,
            None,
            None,
            *[None] * len(ctx.weights),
        )


def _matrices(weights: Sequence[Tensor], masks: Tensor, transposed: bool) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Each weight as (O, I), its mask as a row, and whether that row masks outputs."""
    for weight, mask in zip(weights, masks, strict=True):
        matrix, m = (weight.T, mask.T) if transposed else (weight, mask)
        yield matrix, m.reshape(1, -1), m.shape[0] > 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The stock layers' own products, `nn.Linear`'s and transformers' `Conv1D`'s, so that bits agree with theirs."""
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    made = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return made.view(*x.shape[:-1], weight.shape[1])


def masked_linear(
    x: Tensor,  # (*B, I)
    weights: Sequence[Tensor],  # K of (O, I), or (I, O) when transposed
    masks: Tensor,  # (K, broadcasts over a weight)
    bias: Tensor | None = None,  # (O,)
    *,
    mode: str = "accurate",
    transposed: bool = False,
    impl: str = "auto",
) -> Tensor:
    """A linear layer whose weight is a sum of masked frozen weights: ``x @ (Σ m_k W_k).T + b``.

    Until backward it keeps x and nothing else; autograd's own way keeps the blended weight as well.

    Args:
        x: Input, (*B, I).
        weights: The components' frozen weights, (O, I) each; (I, O) when ``transposed``.
        masks: (K, 1, 1) scalar, (K, 1, I) input, (K, O, 1) output or (K, O, I) element masks; the last two sizes
            swapped when ``transposed``.
        bias: The merged bias, (O,).
        mode: ``"accurate"``, ``"efficient"`` (``Σ (m_k x) @ W_k.T``) or ``"auto"``: efficient up to `FEW_TOKENS`.
        transposed: Weights are stored (I, O), as GPT-2's `Conv1D` does.
        impl: ``"reference"``, ``"eager"``, ``"fused"`` (Triton) or ``"auto"``: fused on CUDA, else eager.

    Returns:
        (*B, O), in x's dtype.

    Raises:
        ValueError: Shapes or dtypes that do not fit, element masks in efficient mode, a weight that requires grad,
            fused where it cannot run.

    >>> weights = [torch.eye(2), 2 * torch.eye(2)]
    >>> masked_linear(torch.tensor([[1.0, 3.0]]), weights, torch.tensor([[[1.0, 0.5]], [[0.0, 0.25]]]))
    tensor([[1., 3.]])
    """
    _check("masked_linear", weights, masks, impl)
    if masks.dim() != 3:
        raise ValueError(f"masked_linear: weights have shape {list(weights[0].shape)}, needed matrices")
    in_features = weights[0].shape[0 if transposed else 1]
    if not x.dim() or x.shape[-1] != in_features:
        raise ValueError(f"masked_linear: last dim of x {list(x.shape)} must be {in_features}, the weights' input")
    element = masks.shape[1] > 1 and masks.shape[2] > 1
    few = x.numel() <= FEW_TOKENS * in_features
    if mode == "auto":
        mode = "efficient" if few and not element else "accurate"
    if mode not in ("accurate", "efficient"):
        raise ValueError(f"masked_linear: mode is {mode!r}, needed accurate, efficient or auto")
    if mode == "efficient" and element:
        raise ValueError("masked_linear: mode 'efficient' cannot do element masks; needed mode 'accurate'")
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    elif x.dtype != weights[0].dtype:
        raise ValueError(f"masked_linear: x is {x.dtype} and the weights are {weights[0].dtype}, needed one dtype")
    if bias is not None:
        bias = bias.to(x.dtype)
    if impl == "reference":
        made = reference.masked_linear(x, weights, masks, bias, mode=mode, transposed=transposed)
        return made.to(x.dtype)
    function = _AccurateLinear if mode == "accurate" else _EfficientLinear
    fused = _fused(impl, weights, "masked_linear")
    with torch.autocast(device, enabled=False):
        if mode == "efficient" and weights[0].dtype != x.dtype:
            weights = [w.to(x.dtype) for w in weights]
        return function.apply(x, masks, bias, transposed, fused, *weights)


class _Embedding(torch.autograd.Function):
    """Gathers rows, then blends them: never (V, H). Saves the ids and the masks, and gathers again in backward."""

    @staticmethod
    def forward(ctx: Any, masks: Tensor, ids: Tensor, fused: bool, *weights: Tensor) -> Tensor:
        ctx.weights, ctx.fused = weights, fused
        ctx.save_for_backward(masks, ids)
        flat = ids.reshape(-1)
        parts = masks[:, flat] if masks.shape[1] > 1 else masks
        return _blend([w[flat] for w in weights], parts, fused).view(*ids.shape, weights[0].shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        masks, ids = ctx.saved_tensors
        flat, g = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
        rows = masks.shape[1] > 1
        shape = (masks.shape[0], flat.numel() if rows else 1, masks.shape[2])
        made = _reduce(g, [w[flat] for w in ctx.weights], shape, ctx.fused)
        if rows:
            made = torch.zeros(masks.shape, dtype=made.dtype, device=made.device).index_add_(1, flat, made)
        return made.to(masks.dtype), None, None, *[None] * len(ctx.weights)


def masked_embedding(
    ids: Tensor,  # (*B,)
    weights: Sequence[Tensor],  # K of (V, H)
    masks: Tensor,  # (K, broadcasts over a weight)
    *,
    impl: str = "auto",
) -> Tensor:
    """Rows of the merged embedding Σ m_k E_k, gathered before they are blended: never a (V, H) tensor.

    Args:
        ids: Token ids, (*B,).
        weights: The components' frozen tables, (V, H) each.
        masks: (K, 1, 1) scalar, (K, 1, H) input, (K, V, 1) output or (K, V, H) element masks.
        impl: As in `masked_linear`.

    Returns:
        (*B, H), in the tables' dtype.

    Raises:
        ValueError: Shapes or dtypes that do not fit, ids that are not integers, a weight that requires grad.

    >>> tables = [torch.zeros(3, 2), torch.ones(3, 2)]
    >>> masked_embedding(torch.tensor([2, 0]), tables, torch.tensor([[[1.0, 1.0]], [[0.5, 0.25]]]))
    tensor([[0.5000, 0.2500],
            [0.5000, 0.2500]])
    """
    _check("masked_embedding", weights, masks, impl)
    if ids.is_floating_point() or masks.dim() != 3:
        raise ValueError(
            f"masked_embedding: ids are {ids.dtype} and tables {list(weights[0].shape)}; needed integers and matrices"
        )
    if impl == "reference":
        return reference.masked_embedding(ids, weights, masks).to(weights[0].dtype)
    return _Embedding.apply(masks, ids, _fused(impl, weights, "masked_embedding"), *weights)
