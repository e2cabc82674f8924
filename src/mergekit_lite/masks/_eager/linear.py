"""Linear layers whose weights are sums of masked frozen weights.

No blended weight is kept until backward. With dW = Gᵀ X, where G is the gradient of the output, the
masks' gradient is reduce(dW * W_k). Backward builds W and dW in blocks of input columns, so it
never holds all of W or dW in memory.

Letters: K components, O out_features, I in_features, *B any leading shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._autograd import (
    Context,
    differentiable_gradients,
    needs_plain,
    wants_graph,
)

from .blend import blend_any, blend_plain, part_of, pieces, reduce_any

Rule = Callable[[Tensor], Tensor]
# number of weight elements that a step of backward builds: 4 MiB (CPU) and 64 MiB (GPU) in float32;
# on a GPU, fewer launches matter more than memory
_COLUMNS = {"cpu": 1 << 20, "cuda": 1 << 24}
_NARROWEST = 128  # smallest number of columns per step; products with fewer columns are slow


def _column_blocks(weights: Sequence[Tensor], transposed: bool) -> Iterator[slice]:
    """Return ranges of input columns, which are the rows of a transposed weight.

    Each range gives complete columns of dX, so results of ranges need not be summed.
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
    """Compute `AccurateLinear` by plain torch operations, for tracing and torch.func."""
    if rule is not None:
        masks = rule(masks)
    weight = blend_plain(weights, masks).to(x.dtype)
    return F.linear(x, weight.T if transposed else weight, bias)


def efficient_linear(
    x: Tensor,  # (*B, I)
    masks: Tensor,
    bias: Tensor | None,
    transposed: bool,
    weights: Sequence[Tensor],
) -> Tensor:
    """Return the sum of the masked products of x with all weights; no merged weight is built.

    Plain torch operations are used, because an autograd function was no faster in training.
    """
    total: Tensor | None = None
    for weight, mask, output in _matrices(weights, masks, transposed):
        row = mask.reshape(-1).to(x.dtype)
        term = _product(x, weight) * row if output else _product(x * row, weight)
        total = term if total is None else total + term
    assert total is not None
    return total if bias is None else total + bias


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == x.dtype or needs_plain(x):
        return F.linear(x, weight.to(x.dtype))
    return _CastProduct.apply(x, weight)


class _CastProduct(torch.autograd.Function):
    """A product with a frozen weight of another dtype, as under autocast.

    The weight is cast again in backward, so that no copy of it is kept.
    """

    @staticmethod
    def forward(ctx: _WeightsContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _WeightsContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return _CastProduct.apply(grad, weight.T), None


class AccurateLinear(torch.autograd.Function):
    """The product of x, (T, I), with the blended weight, as an autograd function.

    There is one product in forward and two in backward, for any number of components. For backward,
    x, the masks before the constraint and the frozen weights are saved. The weights are in memory
    anyway, and autograd can then detect changes of them.

    The merged weight is dropped after the product, and built again in backward in blocks of input
    columns. The constrained masks, which ``rule`` returns, are also computed again.
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
            # gradients are disabled in backward, but the rule's derivative is needed
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
    """Return the gradients of x and of the constrained masks, in blocks of input columns."""
    need_x, need_masks = ctx.needs_input_grad[:2]
    dx = None
    dm = None
    dim = 0 if ctx.transposed else 1  # the dimension of a weight's input columns
    for columns in _column_blocks(weights, ctx.transposed):
        index = (slice(None),) * dim + (columns,)
        parts = [weight[index] for weight in weights]
        # + 1, because the first dimension of masks counts the components
        mask = part_of(masks, columns, dim + 1)
        if need_x:
            weight = blend_any(parts, mask, ctx.fused).to(grad.dtype)
            product = grad @ (weight.T if ctx.transposed else weight)
            if product.shape == x.shape:  # a single block needs no copy
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
            # dm_part is a view of dm, so if masks broadcast over columns, the blocks add up in it
            dm_part = part_of(dm, columns, dim + 1)
            dm_part += part
    return dx, dm


def _matrices(
    weights: Sequence[Tensor], masks: Tensor, transposed: bool
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield each weight as (O, I), its mask as one row, and whether the mask is for outputs."""
    for weight, mask in zip(weights, masks, strict=True):
        matrix, m = (weight.T, mask.T) if transposed else (weight, mask)
        yield matrix, m.reshape(1, -1), m.shape[0] > 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute a linear layer exactly as `nn.Linear` or transformers' `Conv1D` does, bit for bit."""
    if not transposed:
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if bias is None:
        output = flat @ weight
    else:
        output = torch.addmm(bias, flat, weight)
    # no view for two dimensions, because autograd would not allow in-place changes of a view
    return output if x.dim() == 2 else output.view(*x.shape[:-1], weight.shape[1])
