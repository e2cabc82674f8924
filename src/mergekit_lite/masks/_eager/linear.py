"""Linear layers and embeddings whose weights are sums of masked frozen weights.

Neither keeps a blended weight until backward. With dW = Gᵀ X the masks' gradient is reduce(dW *
W_k); backward builds W and dW by blocks of input columns, so that of one layer's two matrices none
is ever whole there.

Letters: K components, O out_features, I in_features, V vocabulary, H hidden size, *B any leading
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._autograd import Context, differentiable_gradients, wants_graph

from .blend import blend_any, blend_plain, part_of, pieces, reduce_any, work_dtype

Rule = Callable[[Tensor], Tensor]
# elements of a weight that a step of backward builds
# 4 and 64 MiB of float32: on a GPU fewer launches count more than memory
_COLUMNS = {"cpu": 1 << 20, "cuda": 1 << 24}
_NARROWEST = 128  # columns of a step; products of fewer are slow


def _column_blocks(weights: Sequence[Tensor], transposed: bool) -> Iterator[slice]:
    """Return ranges of input columns (rows of a transposed weight).

    Each is a complete part of dX, so nothing is summed.
    """
    out_features, in_features = weights[0].shape
    if transposed:
        out_features, in_features = in_features, out_features
    budget = _COLUMNS.get(weights[0].device.type, 1 << 24)
    return pieces(in_features, max(_NARROWEST, budget // max(1, out_features)))


class _WeightsContext(Context, Protocol):
    rule: Rule | None
    transposed: bool
    fused: bool


def accurate_plain(
    x: Tensor,  # (*B, I)
    masks: Tensor,
    bias: Tensor | None,
    rule: Rule | None,
    transposed: bool,
    weights: Sequence[Tensor],
) -> Tensor:
    """Compute `AccurateLinear` by plain operations, to trace and transform."""
    if rule is not None:
        masks = rule(masks)
    weight = blend_plain(weights, masks).to(x.dtype)
    return F.linear(x, weight.T if transposed else weight, bias)


def efficient_plain(
    x: Tensor,  # (*B, I)
    masks: Tensor,
    bias: Tensor | None,
    transposed: bool,
    weights: Sequence[Tensor],
) -> Tensor:
    """Compute `EfficientLinear` by plain operations, to trace and transform."""
    total: Tensor | None = None
    for weight, mask, output in _matrices(weights, masks, transposed, x.dtype):
        row = mask.reshape(-1).to(x.dtype)
        term = F.linear(x, weight) * row if output else F.linear(x * row, weight)
        total = term if total is None else total + term
    assert total is not None
    return total if bias is None else total + bias


class AccurateLinear(torch.autograd.Function):
    """A product of x (T, I) with the blended weight; saves x and the trained masks.

    One product forward and two backward, for any number of components. The frozen weights are
    saved, too: they are in memory anyway, and autograd then notices if one of them changes.

    The merged weight is built for the product and dropped, and built again in backward by blocks of
    input columns. So are the masks that a constraint (``rule``) makes of the trained ones.
    """

    @staticmethod
    def forward(
        ctx: _WeightsContext,
        x: Tensor,
        masks: Tensor,
        bias: Tensor | None,
        rule: Rule | None,
        transposed: bool,
        fused: bool,
        *weights: Tensor,
    ) -> Tensor:
        ctx.rule = rule
        ctx.transposed = transposed
        ctx.fused = fused
        ctx.save_for_backward(x, masks, *weights)
        if rule is not None:
            masks = rule(masks)
        weight = blend_any(weights, masks, fused).to(x.dtype)
        return linear(x, weight, bias, transposed)

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _WeightsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, trained, *weights = ctx.saved_tensors
        need_x, need_masks, need_bias = ctx.needs_input_grad[:3]
        if wants_graph():

            def formula(x: Tensor, masks: Tensor) -> Tensor:
                return accurate_plain(x, masks, None, ctx.rule, ctx.transposed, weights)

            needs = (need_x, need_masks)
            dx, dm = differentiable_gradients(formula, (x, trained), needs, grad)
            db = grad.sum(0) if need_bias else None
            return dx, dm, db, None, None, None, *[None] * len(weights)
        leaf = trained
        masks = trained
        if ctx.rule is not None:
            # backward runs without gradients, and the rule's derivative is needed
            with torch.enable_grad():
                leaf = trained.detach().requires_grad_()
                masks = ctx.rule(leaf)
        dx, dm = _accurate_gradients(ctx, x, masks.detach(), weights, grad)
        if dm is not None:
            dm = dm.to(trained.dtype)
            if ctx.rule is not None:
                (dm,) = torch.autograd.grad(masks, leaf, dm)
        db = grad.sum(0) if need_bias else None
        return dx, dm, db, None, None, None, *[None] * len(weights)


def _accurate_gradients(
    ctx: _WeightsContext, x: Tensor, masks: Tensor, weights: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the masks that multiply, by blocks of input columns."""
    need_x, need_masks = ctx.needs_input_grad[:2]
    dx = None
    dm = None
    dim = 0 if ctx.transposed else 1  # of a weight, where input columns are
    for columns in _column_blocks(weights, ctx.transposed):
        index = (slice(None),) * dim + (columns,)
        parts = [weight[index] for weight in weights]
        # one dimension on: a mask has the components first
        mask = part_of(masks, columns, dim + 1)
        if need_x:
            weight = blend_any(parts, mask, ctx.fused).to(grad.dtype)
            product = grad @ (weight.T if ctx.transposed else weight)
            if product.shape == x.shape:  # one block is all: no copy
                dx = product
            else:
                dx = torch.empty_like(x) if dx is None else dx
                dx[:, columns] = product
        if need_masks:
            if ctx.transposed:
                dw = x[:, columns].T @ grad
            else:
                dw = grad.T @ x[:, columns]
            part = reduce_any(dw, parts, mask.shape, ctx.fused)
            if dm is None:
                dm = torch.zeros(masks.shape, dtype=part.dtype, device=part.device)
            # a view: blocks add up in masks that broadcast over columns
            dm_part = part_of(dm, columns, dim + 1)
            dm_part += part
    return dx, dm


class EfficientLinear(torch.autograd.Function):
    """Products of x (T, I) with every component's weight; saves x and the masks.

    K products forward and K backward (2 K for output masks). No weight is ever built.
    """

    @staticmethod
    def forward(
        ctx: _WeightsContext,
        x: Tensor,
        masks: Tensor,
        bias: Tensor | None,
        transposed: bool,
        *weights: Tensor,
    ) -> Tensor:
        ctx.transposed = transposed
        ctx.save_for_backward(x, masks, *weights)
        total: Tensor | None = None
        for weight, mask, output in _matrices(weights, masks, transposed, x.dtype):
            if output:
                term = torch.mm(x, weight.T) * mask.to(x.dtype)
                total = term if total is None else total.add_(term)
            elif total is None:
                total = torch.mm(x * mask.to(x.dtype), weight.T)
            else:
                total.addmm_(x * mask.to(x.dtype), weight.T)
        assert total is not None
        if bias is not None:
            total += bias
        return total

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _WeightsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, masks, *weights = ctx.saved_tensors
        need_x, need_masks, need_bias = ctx.needs_input_grad[:3]
        db = grad.sum(0) if need_bias else None
        if wants_graph():

            def formula(x: Tensor, masks: Tensor) -> Tensor:
                return efficient_plain(x, masks, None, ctx.transposed, weights)

            needs = (need_x, need_masks)
            dx, dm = differentiable_gradients(formula, (x, masks), needs, grad)
            return dx, dm, db, None, *[None] * len(weights)
        dx, dm = _efficient_gradients(ctx, x, masks, weights, grad)
        return dx, dm, db, None, *[None] * len(weights)


def _efficient_gradients(
    ctx: _WeightsContext, x: Tensor, masks: Tensor, weights: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and the masks, component by component."""
    need_x, need_masks = ctx.needs_input_grad[:2]
    shape = masks.shape[1:]
    work = work_dtype(masks.dtype)
    # K products add up here, where half precision would round each time
    dx = torch.zeros(x.shape, dtype=work_dtype(x.dtype), device=x.device)
    dm = torch.zeros(masks.shape, dtype=work, device=masks.device)
    for k, (weight, mask, output) in enumerate(_matrices(weights, masks, ctx.transposed, x.dtype)):
        # a mask of outputs multiplies after the weight, one of inputs before it
        product = torch.mm(grad * mask.to(grad.dtype) if output else grad, weight)
        if need_x:
            dx += product if output else product * mask
        if need_masks:
            if output:
                column = (grad.to(work) * torch.mm(x, weight.T)).sum(0)
            else:
                column = (x.to(work) * product).sum(0)
            # a scalar mask is treated as an input mask with one value for all
            dm[k] = column.sum() if max(shape) == 1 else column.view(shape)
    return dx.to(x.dtype) if need_x else None, dm.to(masks.dtype) if need_masks else None


def _matrices(
    weights: Sequence[Tensor], masks: Tensor, transposed: bool, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Return each weight as (O, I) in ``dtype`` (autocast's), and its mask as a row.

    With it, whether that row masks outputs.
    """
    for weight, mask in zip(weights, masks, strict=True):
        matrix, m = (weight.T, mask.T) if transposed else (weight, mask)
        yield matrix.to(dtype), m.reshape(1, -1), m.shape[0] > 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The stock layers' own products, so that bits agree with theirs.

    `nn.Linear`'s and transformers' `Conv1D`'s.
    """
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if bias is None:
        output = flat @ weight
    else:
        output = torch.addmm(bias, flat, weight)
    # no view of two dimensions, which autograd would not let change in place
    return output if x.dim() == 2 else output.view(*x.shape[:-1], weight.shape[1])


def embedding_plain(
    masks: Tensor,  # (K, broadcasts over a table)
    ids: Tensor,  # (*B,)
    weights: Sequence[Tensor],
) -> Tensor:  # (*B, H)
    """Compute `Embedding` by plain operations, to trace and transform."""
    rows = torch.stack([F.embedding(ids, w) for w in weights])
    if masks.shape[1] > 1:
        parts = torch.stack([F.embedding(ids, m) for m in masks])
    else:
        parts = masks.reshape(len(weights), *[1] * ids.dim(), masks.shape[2])
    return blend_plain(list(rows), parts).to(weights[0].dtype)


class Embedding(torch.autograd.Function):
    """Rows (N, H) of the blended table for ids (N,): gathered, then blended, never (V, H).

    Saves the ids and the masks, and gathers again in backward.
    """

    @staticmethod
    def forward(
        ctx: _WeightsContext, masks: Tensor, ids: Tensor, fused: bool, *weights: Tensor
    ) -> Tensor:
        ctx.fused = fused
        ctx.save_for_backward(masks, ids, *weights)
        parts = masks[:, ids] if masks.shape[1] > 1 else masks
        return blend_any([F.embedding(ids, w) for w in weights], parts, fused)

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _WeightsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        masks, ids, *weights = ctx.saved_tensors
        if wants_graph():

            def formula(masks: Tensor) -> Tensor:
                return embedding_plain(masks, ids, weights)

            (gradient,) = differentiable_gradients(formula, [masks], [True], grad)
            return gradient, None, None, *[None] * len(weights)
        rows = masks.shape[1] > 1
        shape = (masks.shape[0], ids.numel() if rows else 1, masks.shape[2])
        mask_gradient = reduce_any(grad, [w[ids] for w in weights], shape, ctx.fused)
        if rows:
            # a token may come more than once: its gradients add up
            mask_gradient = torch.zeros(
                masks.shape, dtype=mask_gradient.dtype, device=mask_gradient.device
            ).index_add_(1, ids, mask_gradient)
        return mask_gradient.to(masks.dtype), None, None, *[None] * len(weights)
