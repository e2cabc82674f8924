"""The autograd function of a layer with LoRA adapters, which saves only x for backward.

Forward computes y = x Wᵀ + b, then adds s (x Aᵀ) Bᵀ to y in place. Backward recomputes x Aᵀ, and
the dropout masks from their seeds. Forward and backward of a frozen layer cost 4 T I O flops for
the products with W, and 2 T r (3 O + 4 I) flops for each adapter.

Letters: T tokens, I in_features, O out_features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_components._autograd import (
    Context,
    autocast_dtype,
    differentiable_gradients,
    wants_graph,
)

from .. import reference
from . import products

# up to this many multiplications, float32 products are cheaper than casting float32 factors
_SMALL = 1 << 20
# up to this many output elements in half precision, add_ of a product is faster than addmm_
_FEW = 1 << 15


class Adapter(NamedTuple):
    """The scaling and the dropout probability of one adapter."""

    scaling: float
    dropout_p: float = 0.0


class _Plan(NamedTuple):
    """The settings of `_Lora` that are not tensors."""

    adapters: tuple[Adapter, ...]
    transposed: bool


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the output of `nn.Linear`, or of `Conv1D` if transposed, for x of shape (T, I)."""
    if not transposed:
        return F.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x, weight)


def add_adapters(
    y: Tensor,  # (T, O)
    x: Tensor,  # (T, I)
    factors: Sequence[Tensor],  # A (r, I) and B (O, r) of each adapter in turn
    adapters: Sequence[Adapter],
    *,
    in_place: bool = False,
    masks: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return y plus the adapters' updates, computed with ordinary operations of torch.

    Therefore autograd, torch.func and autocast support this function.

    Args:
        y: The layer's output without adapters.
        x: The layer's input.
        factors: The matrices of the adapters.
        adapters: The scaling and dropout of each adapter.
        in_place: Whether y may be overwritten.
        masks: For each adapter, the tensor (T, I) by which dropout multiplies x, or None for no
            dropout. If ``masks`` is None, torch's own dropout is used.
    """
    autocast = autocast_dtype(x) is not None
    in_place = in_place and not autocast
    for k, one in enumerate(adapters):
        a = factors[2 * k]
        b = factors[2 * k + 1]
        seen = x
        mask = None if masks is None else masks[k]
        if mask is not None:
            seen = x * mask
        elif one.dropout_p and masks is None:
            seen = F.dropout(x, one.dropout_p)
        y = _added(y, seen, a, b, one.scaling, in_place, autocast)
    return y


def _added(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, in_place: bool, autocast: bool
) -> Tensor:
    """Return y, of shape (T, O), plus one adapter's update.

    Factors whose dtype differs from the dtype of y are cast to the dtype of y. However, small
    products with factors of a wider dtype are computed in the wider dtype.
    """
    dtype = y.dtype
    # a compiled graph must not depend on the number of tokens
    dynamic = torch.compiler.is_compiling()
    if autocast:  # addmm would cast y to autocast's dtype as well
        return (y + F.linear(F.linear(x, a), b) * scaling).to(dtype)
    if a.dtype != dtype:
        # on the CPU that we used, even the smallest half-precision product took 20 microseconds
        small = not dynamic and x.shape[0] * (a.numel() + b.numel()) <= _SMALL
        if small and a.dtype.itemsize > dtype.itemsize:
            h = F.linear(x.to(a.dtype), a)
            return torch.addmm(y.to(a.dtype), h, b.T, alpha=scaling).to(dtype)
        a = a.to(dtype)
        b = b.to(dtype)
    h = F.linear(x.to(dtype), a)
    if in_place and dtype.itemsize == 2 and not dynamic and y.numel() <= _FEW:
        return y.add_(F.linear(h, b), alpha=scaling)
    if in_place:
        return y.addmm_(h, b.T, alpha=scaling)
    return torch.addmm(y, h, b.T, alpha=scaling)


class _Tensors(NamedTuple):
    """The weight, bias and factors of `_Lora`, cast to one dtype."""

    weight: Tensor
    bias: Tensor | None
    factors: list[Tensor]  # A, B, A, B, ...

    @classmethod
    def of(cls, dtype: torch.dtype, tensors: Sequence[Tensor | None]) -> _Tensors:
        weight, bias, *factors = tensors
        assert weight is not None
        cast = [factor.to(dtype) for factor in factors if factor is not None]
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype), cast)


class _Piece(NamedTuple):
    """The tensors and settings of one adapter, in the order that ``products.add_`` takes them."""

    a: Tensor
    b: Tensor
    scale: float
    drop: products.Dropout | None


def _pieces(plan: _Plan, t: _Tensors, seeds: Tensor | None, x: Tensor) -> Iterator[_Piece]:
    for k, one in enumerate(plan.adapters):
        drop = None
        if one.dropout_p:
            assert seeds is not None
            drop = products.dropout(seeds[k], x.shape[0], x.shape[1], one.dropout_p)
        # the scale includes dropout's factor 1 / (1 - p), so the masks are 0 and 1
        scale = one.scaling / (1 - one.dropout_p)
        yield _Piece(t.factors[2 * k], t.factors[2 * k + 1], scale, drop)


class _LoraContext(Context, Protocol):
    plan: _Plan


class _Lora(torch.autograd.Function):
    """The autograd function of a linear layer with adapters, for x of shape (T, I).

    It saves x, the parameters, and an 8-byte seed for each adapter with dropout. The tensors after
    the seeds are the weight, the bias or None, and then A and B of each adapter.
    """

    @staticmethod
    def forward(
        ctx: _LoraContext, x: Tensor, plan: _Plan, seeds: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        ctx.plan = plan
        # save the tensors before casting: a saved cast weight would be a second copy in memory
        ctx.save_for_backward(x, seeds, *tensors)
        t = _Tensors.of(x.dtype, tensors)
        y = linear(x, t.weight, t.bias, plan.transposed)
        for piece in _pieces(plan, t, seeds, x):
            products.add_(y, x, *piece)
        return y

    @staticmethod
    # pyrefly: ignore[bad-override]: torch types it (ctx, *gradients)
    def backward(ctx: _LoraContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        x, seeds, *tensors = ctx.saved_tensors
        if wants_graph():
            return _differentiable(plan, ctx.needs_input_grad, grad, x, seeds, tensors)
        need_x, _, _, need_weight, need_bias, *needs = ctx.needs_input_grad
        t = _Tensors.of(x.dtype, tensors)
        gradients: list[Tensor | None] = [None] * len(tensors)
        dx = None
        if need_x:
            dx = grad @ (t.weight.T if plan.transposed else t.weight)
        if need_weight:
            gradients[0] = x.T @ grad if plan.transposed else grad.T @ x
        if need_bias:
            gradients[1] = grad.sum(0)
        for k, piece in enumerate(_pieces(plan, t, seeds, x)):
            a, b = 2 * k, 2 * k + 1  # indices of the adapter's factors
            gradients[2 + a], gradients[2 + b] = products.gradients(
                grad, x, *piece, dx, needs[a], needs[b]
            )
        for place, tensor in enumerate(tensors):
            part = gradients[place]
            if part is not None and tensor is not None:  # under autocast, their dtypes differ
                gradients[place] = part.to(tensor.dtype)
        return dx, None, None, *gradients


def _differentiable(
    plan: _Plan,
    needs: Sequence[bool],
    grad: Tensor,
    x: Tensor,
    seeds: Tensor | None,
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again.

    Autograd computes them from ordinary products, and saves every intermediate result.
    """
    masks: list[Tensor | None] = [None] * len(plan.adapters)
    for k, one in enumerate(plan.adapters):
        if one.dropout_p:
            assert seeds is not None
            kept = reference.keep_mask(seeds[k], x.shape[0], x.shape[1], one.dropout_p)
            masks[k] = (kept / (1 - one.dropout_p)).to(x.dtype)

    def formula(x: Tensor, *tensors: Tensor | None) -> Tensor:
        t = _Tensors.of(x.dtype, tensors)
        y = linear(x, t.weight, t.bias, plan.transposed)
        return add_adapters(y, x, t.factors, plan.adapters, masks=masks)

    with torch.autocast(x.device.type, enabled=False):
        dx, *rest = differentiable_gradients(formula, (x, *tensors), (needs[0], *needs[3:]), grad)
    return dx, None, None, *rest


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Sequence[Tensor],
    adapters: Sequence[Adapter],
    *,
    transposed: bool = False,
    seeds: Tensor | None = None,
) -> Tensor:
    """Return the output of a layer with adapters, without checking the arguments.

    ``x``, of shape (T, I), is copied only if autocast requires another dtype.
    """
    adapters = tuple(adapters)
    autocast = autocast_dtype(x)
    if autocast is not None:
        x = x.to(autocast)
    if seeds is None and any(one.dropout_p for one in adapters):
        # from torch's generator, so that gradient checkpointing draws the same masks again
        count = (len(adapters),)
        seeds = torch.randint(-(2**63), 2**63 - 1, count, device=x.device, dtype=torch.int64)
    plan = _Plan(adapters, transposed)
    with nullcontext() if autocast is None else torch.autocast(x.device.type, enabled=False):
        return _Lora.apply(x, plan, seeds, weight, bias, *factors)
