"""The autograd of a layer with LoRA adapters: in-place products, and only x saved for backward.

y = x Wᵀ + b, then y += s (x Aᵀ) Bᵀ in place. Backward computes x Aᵀ again, and dropout masks from
their seeds. The least cost is the frozen layer's own two products, 4 T I O flops, and
2 T r (3 O + 4 I) flops for each adapter.

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

# multiplications up to which float32 products are cheaper than casting float32 factors
_SMALL = 1 << 20
_FEW = 1 << 15  # output elements up to which, in half precision, add_ of a product beats addmm_


class Adapter(NamedTuple):
    """One adapter's scaling and dropout."""

    scaling: float
    dropout_p: float = 0.0


class _Plan(NamedTuple):
    """The settings of `_Lora` that are not tensors."""

    adapters: tuple[Adapter, ...]
    transposed: bool


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return what `nn.Linear`, or transformers' `Conv1D` if transposed, outputs for x (T, I)."""
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
    """Add the adapters' updates to y, by plain products.

    So autograd, functorch and autocast work on them.

    Args:
        y: The layer's own output.
        x: Its input.
        factors: The adapters' matrices.
        adapters: Their scaling and dropout.
        in_place: Whether y may be overwritten.
        masks: For each adapter, the factors (T, I) by which dropout multiplies x, or None. If
            ``masks`` is None, torch's own dropout is used.
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
    """Add one adapter's update to y, (T, O).

    Factors of another dtype are cast to y's dtype; small products with wider factors are computed
    in the factors' dtype instead.
    """
    dtype = y.dtype
    # a compiled graph must not depend on the number of tokens
    dynamic = torch.compiler.is_compiling()
    if autocast:  # addmm with y would round y as well
        return (y + F.linear(F.linear(x, a), b) * scaling).to(dtype)
    if a.dtype != dtype:
        # a half-precision product, however small, took 20 microseconds on the CPU that we used
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
    """The tensors of `_Lora` by role, in x's dtype (autocast's dtype, if it is on)."""

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
    """The tensors and settings of one adapter, as the products expect them."""

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
        # the scale includes dropout's factor, so masks are 0 and 1
        scale = one.scaling / (1 - one.dropout_p)
        yield _Piece(t.factors[2 * k], t.factors[2 * k + 1], scale, drop)


class _LoraContext(Context, Protocol):
    plan: _Plan


class _Lora(torch.autograd.Function):
    """A linear layer and its adapters, for x (T, I).

    It saves x, the parameters and 8 bytes per dropout. The tensors after the seeds are the weight,
    the bias or None, then A and B of each adapter.
    """

    @staticmethod
    def forward(
        ctx: _LoraContext, x: Tensor, plan: _Plan, seeds: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        ctx.plan = plan
        # not cast: a saved cast would be a second copy of the weight
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
            if part is not None and tensor is not None:  # under autocast x has another dtype
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

    Autograd computes them from plain products, and saves every intermediate result.
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
    """Return the output of a layer with its adapters, without checks.

    ``x``, (T, I), is only copied if autocast needs another dtype.
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
