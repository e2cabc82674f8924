"""`masked_linear` and `masked_embedding`: layers whose weights are sums of masked frozen weights.

Neither keeps a blended weight until backward. With dW = Gᵀ X the masks' gradient is reduce(dW * W_k); backward builds W
and dW by blocks of input columns, so that of one layer's two matrices none is ever whole there.

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
from .blending import blend_any, check, part_of, pieces, reduce_any, uses_fused, work_dtype

_COLUMNS = {"cpu": 1 << 20, "cuda": 1 << 24}  # elements of a weight that a step of backward builds,
_NARROWEST = 128  # and at least so many columns, or products lose their speed
FEW_TOKENS = 16
FEW_TOKENS_TRAINING = 128
"""``mode="auto"`` is efficient up to so many tokens, without and with gradients (docs/performance.md)."""


def _column_blocks(weights: Sequence[Tensor], transposed: bool) -> Iterator[slice]:
    """Ranges of input columns (rows of a transposed weight): each is a complete part of dX, so nothing is summed."""
    out_features, in_features = weights[0].shape if not transposed else weights[0].shape[::-1]
    budget = _COLUMNS.get(weights[0].device.type, 1 << 24)
    return pieces(in_features, max(_NARROWEST, budget // max(1, out_features)))


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
        weight = blend_any(weights, masks, fused).to(x.dtype)
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
                weight = blend_any(parts, part_of(masks, columns, dim + 1), ctx.fused).to(g.dtype)
                dx[:, columns] = g @ (weight.T if ctx.transposed else weight)
            if dm is not None:
                dw = flat[:, columns].T @ g if ctx.transposed else g.T @ flat[:, columns]
                part = part_of(dm, columns, dim + 1)
                part += reduce_any(dw, parts, part.shape, ctx.fused)
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
        for weight, mask, output in _matrices(weights, masks, transposed, x.dtype):
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
        for weight, mask, output in _matrices(ctx.weights, masks, ctx.transposed, x.dtype):
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


def _matrices(
    weights: Sequence[Tensor], masks: Tensor, transposed: bool, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Each weight as (O, I) in ``dtype`` (autocast's), its mask as a row, and whether that row masks outputs."""
    for weight, mask in zip(weights, masks, strict=True):
        matrix, m = (weight.T, mask.T) if transposed else (weight, mask)
        yield matrix.to(dtype), m.reshape(1, -1), m.shape[0] > 1


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
        mode: ``"accurate"``, ``"efficient"`` (``Σ (m_k x) @ W_k.T``) or ``"auto"``: efficient up to
            `FEW_TOKENS` (`FEW_TOKENS_TRAINING` with gradients), where it is the faster one.
        transposed: Weights are stored (I, O), as GPT-2's `Conv1D` does.
        impl: ``"reference"``, ``"eager"``, ``"fused"`` (Triton) or ``"auto"``: eager.

    Returns:
        (*B, O), in x's dtype.

    Raises:
        ValueError: Shapes or dtypes that do not fit, element masks in efficient mode, a weight that requires grad,
            fused where it cannot run.

    >>> weights = [torch.eye(2), 2 * torch.eye(2)]
    >>> masked_linear(torch.tensor([[1.0, 3.0]]), weights, torch.tensor([[[1.0, 0.5]], [[0.0, 0.25]]]))
    tensor([[1., 3.]])
    """
    check("masked_linear", weights, masks, impl)
    if masks.dim() != 3:
        raise ValueError(f"masked_linear: weights have shape {list(weights[0].shape)}, needed matrices")
    in_features = weights[0].shape[0 if transposed else 1]
    if not x.dim() or x.shape[-1] != in_features:
        raise ValueError(f"masked_linear: last dim of x {list(x.shape)} must be {in_features}, the weights' input")
    element = masks.shape[1] > 1 and masks.shape[2] > 1
    training = torch.is_grad_enabled() and (x.requires_grad or masks.requires_grad)
    few = x.numel() <= (FEW_TOKENS_TRAINING if training else FEW_TOKENS) * in_features
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
    if mode == "efficient" and impl == "fused":
        raise ValueError("masked_linear: impl 'fused' has no path for mode 'efficient', which blends nothing")
    function = _AccurateLinear if mode == "accurate" else _EfficientLinear
    fused = mode == "accurate" and uses_fused(impl, weights, "masked_linear")
    with torch.autocast(device, enabled=False):
        return function.apply(x, masks, bias, transposed, fused, *weights)


class _Embedding(torch.autograd.Function):
    """Gathers rows, then blends them: never (V, H). Saves the ids and the masks, and gathers again in backward."""

    @staticmethod
    def forward(ctx: Any, masks: Tensor, ids: Tensor, fused: bool, *weights: Tensor) -> Tensor:
        ctx.weights, ctx.fused = weights, fused
        ctx.save_for_backward(masks, ids)
        flat = ids.reshape(-1)
        parts = masks[:, flat] if masks.shape[1] > 1 else masks
        return blend_any([w[flat] for w in weights], parts, fused).view(*ids.shape, weights[0].shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
        masks, ids = ctx.saved_tensors
        flat, g = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
        rows = masks.shape[1] > 1
        shape = (masks.shape[0], flat.numel() if rows else 1, masks.shape[2])
        made = reduce_any(g, [w[flat] for w in ctx.weights], shape, ctx.fused)
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
    check("masked_embedding", weights, masks, impl)
    if ids.is_floating_point() or masks.dim() != 3:
        raise ValueError(
            f"masked_embedding: ids are {ids.dtype} and tables {list(weights[0].shape)}; needed integers and matrices"
        )
    if impl == "reference":
        return reference.masked_embedding(ids, weights, masks).to(weights[0].dtype)
    return _Embedding.apply(masks, ids, uses_fused(impl, weights, "masked_embedding"), *weights)
